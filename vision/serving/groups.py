"""Pending requests for the answers to a prompt, and partial rollouts: newer weights continue answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.config.binding import Recipe
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Trajectory
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.token_steps import continued
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.server import Source
from mmrl.vision.serving.servers import Answered, Asked, Servers
from mmrl.vision.serving.wire import Answer


class AsksServers(Protocol):
    """Interface of engines that sample from servers, for `ServedTurns`, branches and `StepsAhead`."""

    policy: Any
    stream: Stream
    recipe: Recipe
    asking: Servers
    max_completion_length: int

    def part_size(self) -> bool | int:
        """Return the largest part of an answer in tokens. True: set by `max_staleness`; False: no limit."""
        ...

    def load_weights(self) -> str:
        """Load the current weights into the servers, and return their version."""
        ...

    def request(
        self,
        encoded: EncodedPrompt,
        n: int,
        most: int,
        seed: int,
        version: str,
        temperature: float,
        *,
        prompt: Prompt | None = None,
    ) -> dict[str, Any]:
        """Create the request for `n` answers of at most `most` tokens."""
        ...

    def begin_turns(
        self, turns: Sequence[GenerationRequest], version: str, temperature: float | None = None
    ) -> list[Group]:
        """Request one turn of every conversation."""
        ...

    def rows(self, group: Group) -> list[Trajectory]:
        """Wait for the answers to a prompt, and return one training row per answer."""
        ...

    def compare_groups(self, groups: Sequence[Group], version: str) -> None:
        """Compare log-probabilities of answers with the policy's, if a comparison is due."""


@dataclass(frozen=True, eq=False)
class Part:
    """The next part of all answers to a prompt, sampled with one version of the weights.

    Args:
        version: Number of finished training steps of the weights.
        limit: Maximal number of tokens of the part.
        seeds: One seed per answer.
        request: Maps (prompt with the answer so far, maximal number of tokens, seed) to a request.
    """

    version: int
    limit: int
    seeds: Sequence[int]
    request: Callable[[EncodedPrompt, int, int], Mapping[str, Any]]
    futures: list[Answered] = field(init=False)  # one per answer, empty for ended answers

    def __post_init__(self) -> None:
        object.__setattr__(self, "futures", [Future() for _ in self.seeds])


@dataclass(frozen=True, eq=False)
class Group:
    """A pending request for all answers to a prompt.

    Args:
        prompt: The prompt.
        encoded: The prompt as the model reads it.
        places: Indices of the prompt in the list of prompts.
        temperature: Temperature of the answers.
        request: The request for the answers, or for their first part.
        answers: The answers to the request.
        version: Number of finished training steps of the weights of the first part.
        parts: Later parts of the answers, in order.
    """

    prompt: Prompt
    encoded: EncodedPrompt
    places: list[int]
    temperature: float
    request: Mapping[str, Any]
    answers: Answered = field(default_factory=Future)
    version: int = 0
    parts: list[Part] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """Number of finished training steps of the newest weights that sample these answers."""
        return self.parts[-1].version if self.parts else self.version

    def joined(self, parts: Sequence[Part]) -> list[tuple[Answer, Tensor]]:
        """Wait for `parts`; return each answer, joined from its parts, and its weight version per token."""
        joined = [(answer, _full(answer, self.version)) for answer in self.answers.result()[0]]
        for part in parts:
            for number, future in enumerate(part.futures):
                (answer, versions), (found, _) = joined[number], future.result()
                for more in found:
                    ids, logp = torch.cat([answer.ids, more.ids]), torch.cat([answer.logp, more.logp])
                    joined[number] = (
                        Answer(ids, logp, more.stopped),
                        torch.cat([versions, _full(more, part.version)]),
                    )
        return joined

    def requests(self, part: Part, most: int) -> list[Asked]:
        """Wait for earlier parts; return requests of `part` for unfinished answers below `most` tokens."""
        asked, joined = [], self.joined(self.parts[: self.parts.index(part)])
        for (answer, _), future, seed in zip(joined, part.futures, part.seeds, strict=True):
            if (left := most - len(answer.ids)) and not answer.stopped:
                request = part.request(continued(self.encoded, answer.ids), min(part.limit, left), seed)
                asked.append((future, self.prompt.uid, request))
            else:
                future.set_result(([], Source("", 0)))
        return asked


def _full(answer: Answer, version: int) -> Tensor:
    return torch.full((len(answer.ids),), float(version))
