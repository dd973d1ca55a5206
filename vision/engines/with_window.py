"""The engine of truncated rollouts: answers are cut at a window, and go on in the next step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Prompt, Rollouts, Trajectory
from mmrl.data.unfinished import BEGUN, NOTED, UNFINISHED
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.decoding.token_steps import Suffix
from mmrl.vision.engines.generate import Generate
from mmrl.vision.models.processor import EncodedPrompt


@engine(sets_tags={UNFINISHED, CHANGED})
@dataclass(eq=False)
class WithWindow:
    """Sample at most a window of tokens of every answer in a step (T-PPO, arXiv 2506.15050).

    Answers that did not end are tagged `unfinished`; the sampler `with_unfinished` asks for their rest in the
    next step. Only the tokens of this step are learned; those before it were learned when they were sampled,
    have no notes, and are prefilled with the prompt. An answer ends for good at the engine's
    `max_completion_length`. `with_replay` and its relatives remember answers of one window only.
    Evaluations get whole answers of the wrapped engine, `vision.generate`.

    Args:
        engine: The wrapped engine.
        window: The most tokens of an answer that are sampled in a step.
    """

    engine: Generate
    _: KW_ONLY
    stream: Stream
    window: PositiveInt
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Begin, or continue, an answer to every entry."""
        if self.stream.purpose != "train":
            return self.engine.rollout(prompts)
        counters: dict[str, count[int]] = defaultdict(count)
        begun = [prompt.columns.get(BEGUN) or {name: torch.zeros(0) for name in NOTED} for prompt in prompts]
        plain = [_without_begun(prompt) for prompt in prompts]
        encoded = [self.policy.prompt_encoder.encode(prompt) for prompt in plain]
        requests = []
        for prompt, read, before in zip(plain, encoded, begun, strict=True):
            index = next(counters[prompt.uid])
            ids = before["token"].long()
            left = min(self.window, self.engine.max_completion_length - len(ids))
            # Of this step and this row alone, so that a draw depends on no other row.
            uniform = torch.rand(left, generator=self.stream.generator(prompt.uid, index))
            requests.append(GenerationRequest(prompt, index, _after(read, ids), uniform))
        rows = self.engine.answer(requests)
        return tuple(map(self._joined, rows, encoded, begun))

    def _joined(self, row: Trajectory, encoded: EncodedPrompt, before: dict[str, Tensor]) -> Trajectory:
        """Make the row of the whole answer so far; the tokens of earlier steps are not learned again."""
        begun = len(before["token"])
        notes = {"token": torch.cat([before["token"].to(row.notes["token"]), row.notes["token"]])}
        for name in ("logp", "entropy"):
            notes[name] = torch.cat([row.notes[name].new_full((begun,), torch.nan), row.notes[name]])
        chosen = torch.arange(len(notes["token"])) >= begun
        stopped = row.outcomes[-1].tags["finish"] == "stop"
        whole = self.engine.row(row.prompt, encoded, notes, stopped, chosen if begun else None)
        # A replayed row is made from its tokens alone, so those of earlier steps would be learned again.
        tags = {CHANGED: "yes"} if begun else {}
        if not stopped and whole.length < self.engine.max_completion_length:
            tags[UNFINISHED] = "yes"
        (outcome,) = whole.outcomes
        return replace(whole, outcomes=(replace(outcome, tags={**outcome.tags, **tags}),))


def _without_begun(prompt: Prompt) -> Prompt:
    columns = {name: value for name, value in prompt.columns.items() if name != BEGUN}
    return replace(prompt, columns=columns) if BEGUN in prompt.columns else prompt


def _after(prompt: EncodedPrompt, ids: Tensor) -> EncodedPrompt:
    """Append the tokens (T,) of an answer to a prompt, as the beginning of what is read."""
    if not len(ids):
        return prompt
    positions = torch.cat([prompt.positions, Suffix.answer(prompt, ids).positions], 1)
    return EncodedPrompt(prompt.uid, torch.cat([prompt.ids, ids]), positions, prompt.media)
