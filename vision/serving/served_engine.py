"""Base class of engines that sample from servers: weights, requests, retries, comparisons and rows."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from mmrl.config.binding import Recipe
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
)
from mmrl.core.rng import Stream
from mmrl.core.types import VERSION, Prompt, Rollouts, Trajectory
from mmrl.runtime.files import make_private
from mmrl.runtime.fsdp import in_shards
from mmrl.vision.decoding.decoding import GenerationRequest, answer_row
from mmrl.vision.models.loading import TokenPolicy
from mmrl.vision.models.processor import EncodedPrompt
from mmrl.vision.serving.agreement import check_agreement, gap
from mmrl.vision.serving.branches import ServedTurns
from mmrl.vision.serving.groups import Group
from mmrl.vision.serving.server import Server, Source, Weights
from mmrl.vision.serving.servers import LOCK, Servers, locked
from mmrl.vision.serving.steps_ahead import StepsAhead
from mmrl.vision.serving.weights import WeightsWriter
from mmrl.vision.serving.wire import Answer, media_of, numbers_of


class ServedPolicy(TokenPolicy, Protocol):
    """A token policy whose weights are sent to servers."""

    module: nn.Module
    adapter: Any  # LoRA adapter; None if the model itself is trained


@dataclass(eq=False)
class ServedEngine:
    """Base class of engines that sample from servers, which have a copy of the policy's weights."""

    policy: ServedPolicy
    _: KW_ONLY
    stream: Stream
    recipe: Recipe
    servers: tuple[str, ...]
    max_completion_length: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    top_p: PositiveShare = 1.0
    top_k: NonNegativeInt = 0
    min_p: ShareBelowOne = 0.0
    parallel: PositiveInt = 64
    request_timeout: PositiveFloat = 600.0
    timeout: PositiveFloat = 300.0
    weights_folder: str = ""
    notes: ClassVar[frozenset[str]] = frozenset({"logp", "token", "temperature"})
    answers_elsewhere: ClassVar[bool] = True  # so single decoding steps cannot be changed
    batch_size: ClassVar[int] = 0  # 0: one batch; `parallel` limits concurrent requests

    def __post_init__(self) -> None:
        if not self.servers or len({*self.servers}) < len(self.servers):
            raise ConfigError("`servers` must name one address or more, none of them twice")
        self.check_policy(self.recipe.policy.options)
        own = Path(tempfile.gettempdir()) / f"mmrl-weights-{os.getuid()}"
        of_servers = hashlib.sha256(" ".join(self.servers).encode()).hexdigest()[:8]
        self.folder = (Path(self.weights_folder) if self.weights_folder else own).absolute() / of_servers
        self.writer = self.make_writer()
        self.asking = Servers(self.servers, self.folder, kind=self.server_class(), **self.pool_options())
        self.ahead = StepsAhead(self)
        self.compared: set[tuple] = set()  # finished comparisons (kind of media, updates, joins)
        self.to_compare: list[tuple[str, str, Rollouts]] = []  # pending (kind of media, server, answers)
        self.stand_in: Rollouts = ()  # dummy rows, to join forward passes of other processes

    # ---- methods that depend on the kind of servers

    def server_class(self) -> type[Server]:
        """Return the class of the servers."""
        raise NotImplementedError

    def check_kinds(self, uid: str, kinds: Set[str]) -> None:
        """Raise `ConfigError` for kinds of media in a prompt that the servers do not accept."""
        raise NotImplementedError

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
        """Create the request for `n` answers (1 if decoding is greedy) of at most `most` tokens.

        `prompt` has the media of `encoded` as they were before preprocessing.
        """
        raise NotImplementedError

    def undistorted(self, group: Group) -> dict[str, Any]:
        """Create a request for the first tokens of one answer, without top-p, top-k and min-p."""
        raise NotImplementedError

    def check_together(self, kinds: Mapping[str, str]) -> None:
        """Raise ValueError if servers cannot serve prompts with these kinds of media concurrently.

        `kinds` maps each kind of media to the uid of a prompt that has it.
        """

    def make_writer(self) -> WeightsWriter:
        """Create the writer of the weights that the servers load."""
        return WeightsWriter(self.policy, self.folder)

    def pool_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Servers`, the pool of servers."""
        limits = {"request_timeout": self.request_timeout, "timeout": self.timeout}
        return {**limits, "parallel": self.parallel}

    def part_size(self) -> bool | int:
        """Return the largest part of an answer in tokens. True: set by `max_staleness`; False: no limit."""
        return False

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by name."""
        return self.asking.take()

    def check_rows(self, kind: str, url: str, rows: Rollouts) -> None:
        """Compare answers to one kind of media with the policy; raise RuntimeError if they differ."""
        check_agreement(self.policy, kind, url, rows, self.server_class().causes)

    # ---- methods for all kinds of servers

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample an answer for every entry of `prompts`, in order."""
        rows: dict[int, Trajectory] = {}
        begun = self.ahead.take(prompts, self.ask)
        with self.asking.collecting():
            for group in begun.groups:
                rows |= zip(group.places, self.rows(group), strict=True)
            self.compare_groups(begun.groups, begun.weights.version)  # for servers that joined since `ask`
        return tuple(rows[place] for place in range(len(prompts)))

    def to_send(self) -> Iterable[torch.Tensor]:
        """Return the parameters that servers need: of the adapter, or of the whole model."""
        return self.writer.tensors().values()

    def make_folder(self) -> None:
        """Create the folder for weights and lock files; raise `ConfigError` if it is another user's."""
        if not self.weights_folder:  # the default folder's parent is writable by other users
            make_private(self.folder.parent)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def send(self) -> None:
        """Write the current weights, which `ask` loads into the servers."""
        self.make_folder()
        with locked(self.folder / LOCK):
            self.writer()

    def compare(self, even: Callable[..., Iterable[tuple]]) -> None:
        """Compare pending answers with a sharded policy; `even` gives all processes equally many passes."""
        due, self.to_compare = self.to_compare, []
        for (kind, url, rows), counts, _ in even(due, ("", "", self.stand_in)):
            if counts:
                self.check_rows(kind, url, rows)
            else:
                gap(self.policy, rows)

    def ask(self, prompts: Sequence[Prompt]) -> None:
        """Request answers to `prompts` from the current weights; `rollout` collects the answers."""
        for prompt in prompts:
            self.check_kinds(prompt.uid, {medium.kind for medium in prompt.media})
        self.check_together({medium.kind: prompt.uid for prompt in prompts for medium in prompt.media})
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt.uid, []).append(place)
        weights = self._written()
        # Encode outside of `collecting`, because an unreadable prompt must not cancel other requests.
        groups = [self._first(prompts[where[0]], where, weights.version) for where in places.values()]
        with self.asking.collecting():
            self.ahead.begin(prompts, groups, weights)
            self.compare_groups(groups, weights.version)  # while the policy has the same weights

    def converse(self) -> ServedTurns:
        """Load the current weights, and return the sampler for a batch of conversations."""
        return ServedTurns(self, self.load_weights())

    def answer(self, rows: Sequence[GenerationRequest]) -> Rollouts:
        """Sample an answer for every request, in order, with at most one token per random number."""
        return self.converse().sample(rows)

    def row(
        self,
        prompt: Prompt,
        encoded: EncodedPrompt,
        notes: dict[str, torch.Tensor],
        stopped: bool,
        chosen: torch.Tensor | None = None,
    ) -> Trajectory:
        """Create the training row of an answer; the arguments are those of `answer_row`."""
        encoder = self.policy.prompt_encoder
        return answer_row(encoder, self.temperature, prompt, encoded, notes, stopped, chosen)

    def greedily(self) -> Self:
        """Return a copy that decodes greedily, on the same servers."""
        greedy = copy(self)
        greedy.temperature, greedy.ahead = 0.0, StepsAhead(greedy)
        return greedy

    def pop_metrics(self) -> Mapping[str, float]:
        """Return metrics since the last call: living servers, repeated requests, seconds of work.

        The names of metrics of a frozen model, such as a judge, begin with `judge/`.
        """
        trained = any(weight.requires_grad for weight in self.policy.module.parameters())
        prefix = "" if trained else "judge/"
        return {f"{prefix}{name}": value for name, value in self.take_metrics().items()}

    @staticmethod
    def check_policy(options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for options of a policy that servers cannot serve."""
        for name in ("transform", "roles"):
            if options.get(name):
                raise ConfigError(f"a server serves the model without `policy.{name}`; use `vision.generate`")

    def load_weights(self) -> str:
        """Load the current weights into the servers, and return their version."""
        weights = self._written()
        self.asking.begin(weights, (), list).result()
        return weights.version

    def _written(self) -> Weights:
        self.writer.keep = len(self.ahead.begun) + 2  # versions that pending requests need
        self.send()
        assert self.writer.latest is not None  # `send` has written the weights
        return self.writer.latest

    def _first(self, prompt: Prompt, places: list[int], version: str) -> Group:
        """Create the request for the answers to a prompt; with partial rollouts, for their first part."""
        encoded, most = self.policy.prompt_encoder.encode(prompt), self.ahead.limit(self.stream.step)
        seed = int(torch.randint(1 << 31, (1,), generator=self.stream.generator("vllm", prompt.uid)))
        request = self.request(encoded, len(places), most, seed, version, self.temperature, prompt=prompt)
        return Group(prompt, encoded, places, self.temperature, request, version=self.ahead.now)

    def begin_turns(
        self, turns: Sequence[GenerationRequest], version: str, temperature: float | None = None
    ) -> list[Group]:
        """Request one turn of every conversation, seeded by the turn's first random number."""
        shown: dict[str, str] = {}
        for turn in turns:
            kinds = [kind for kind, number in numbers_of(turn.encoded).items() if number]
            self.check_kinds(turn.prompt.uid, {*kinds})
            shown |= dict.fromkeys(kinds, turn.prompt.uid)
        self.check_together(shown)
        temperature, groups = self.temperature if temperature is None else temperature, []
        for turn in turns:
            seed = int(turn.uniform[0] * (1 << 31))
            asked = turn.encoded, 1, len(turn.uniform), seed, version, temperature
            request = self.request(*asked, prompt=turn.prompt)
            answers = self.asking.ask(turn.prompt.uid, request)
            groups.append(Group(turn.prompt, turn.encoded, [0], temperature, request, answers))
        return groups

    def rows(self, group: Group) -> list[Trajectory]:
        """Wait for the answers to a prompt, and return one training row per answer."""
        answers = group.joined(group.parts)
        # All entries of a prompt share the single answer of a greedy request.
        return [self._row(group, *answers[number % len(answers)]) for number in range(len(group.places))]

    def _row(self, group: Group, answer: Answer, versions: torch.Tensor | None = None) -> Trajectory:
        """Convert an answer of a server to a row."""
        notes = {"logp": answer.logp, "token": answer.ids}
        notes |= {VERSION: versions} if self.ahead.partial and versions is not None else {}
        encoder = self.policy.prompt_encoder
        return answer_row(encoder, group.temperature, group.prompt, group.encoded, notes, answer.stopped)

    def compare_groups(self, groups: Sequence[Group], version: str) -> None:
        """Compare answers with the policy, for each server and kind of media, if a comparison is due.

        A comparison is due at the start, after 1, 2, 4, ... weight updates, and after a server joins. A new
        adapter is 0 and updates are small, so only later comparisons show that a server ignores the adapter.
        Answers without log-probabilities are skipped. If no comparison is due, this waits for no answer.
        """
        if not groups:
            return
        end = torch.tensor(self.policy.prompt_encoder.end[:1])
        self.stand_in = (self._row(groups[0], Answer(end, torch.zeros(1), True)),)
        now = lambda: (self.writer.updates.bit_length(), tuple(s.joins for s in self.asking.servers))
        kinds, moment = {media_of(group.encoded) for group in groups}, now()
        due = {(kind, *moment) for kind in kinds} - self.compared
        if not due or self.writer.version() != version:  # the answers are from older weights
            return
        seen: set[tuple[str, Source]] = set()  # one group per kind of media and server
        for group in groups:
            kind, (answers, source) = media_of(group.encoded), group.answers.result()
            if (kind, source) not in seen and _have_logp(answers):
                seen.add((kind, source))
                if self.top_p < 1 or self.top_k or self.min_p:  # ask for untruncated answers
                    answers, source = self.asking.ask(group.prompt.uid, self.undistorted(group)).result()
                if _have_logp(answers):
                    rows = tuple(self._row(group, answer) for answer in answers)
                    self.to_compare.append((kind, source.url, rows))
        # Read `now` again: servers may have joined meanwhile.
        self.compared |= {(kind, *now()) for kind in {kind for kind, _ in seen}}
        if not in_shards(self.policy.module):  # if sharded, the training loop calls `compare` instead
            self.compare(lambda due, stand_in: ((one, True, False) for one in due))


def _have_logp(answers: Sequence[Answer]) -> bool:
    """Whether any token of the answers has a log-probability."""
    return any(not answer.logp.isnan().all() for answer in answers)
