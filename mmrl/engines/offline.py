"""Recorded answers as rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.config.registry import engine
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts


@engine
class Offline:
    """Use recorded answers as rollouts: demonstrations, or the rows of preference pairs.

    The answers of a prompt are used in order, starting over after the last. With `shuffle` the order is
    drawn anew for every collection, so that of many answers any may be compared (GDRO, arXiv 2601.02036,
    ranks 6 of 16).
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, policy: Policy, *, stream: Stream, shuffle: bool = False) -> None:
        self.policy, self.stream, self.shuffle = policy, stream, shuffle

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Encode one answer for every entry of `prompts`."""
        asked: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            if not prompt.answers:
                raise ValueError(
                    f"prompt '{prompt.uid}' has no recorded answers; the engine `offline` needs them"
                )
            turn = asked.get(prompt.uid, 0)
            rows.append(self.policy.encode(prompt, prompt.answers[self._order(prompt)[turn]]))
            asked[prompt.uid] = (turn + 1) % len(prompt.answers)
        return tuple(rows)

    def _order(self, prompt: Prompt) -> Sequence[int]:
        places = range(len(prompt.answers))
        if not self.shuffle:
            return places
        return torch.randperm(len(places), generator=self.stream.generator(prompt.uid)).tolist()
