"""Uniform sampling: every prompt once per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmrl.config.registry import sampler
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt


@sampler
class Uniform:
    """Draw every prompt once per epoch, reshuffled every epoch (`shuffle: false`: in data order)."""

    def __init__(self, data: Sequence[Prompt], *, stream: Stream, shuffle: bool = True) -> None:
        self.data, self.stream, self.shuffle = data, stream, shuffle
        self.drawn = 0
        self._epoch, self._order = -1, range(len(data))

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw the next prompts, `num_generations` entries each; no prompt comes twice in one draw."""
        chosen: dict[int, None] = {}  # ordered set: a draw across two epochs could repeat prompts
        while len(chosen) < min(num_prompts, len(self.data)):
            epoch, place = divmod(self.drawn, len(self.data))
            if self.shuffle and epoch != self._epoch:
                self._epoch, self._order = epoch, self.order_of(epoch)
            chosen[self._order[place]] = None
            self.drawn += 1
        return [self.data[i] for i in chosen for _ in range(num_generations)]

    def order_of(self, epoch: int) -> list[int]:
        """Return the shuffled indices of all prompts, which depend only on seed and epoch."""
        return torch.randperm(len(self.data), generator=self.stream.fixed("uniform", epoch)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts drawn so far."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the prompts that were drawn before."""
        self.drawn = state["drawn"]
