"""Shared code of samplers: draws without repetition within a step, and statistics per prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.data.row_prompts import uids_of


@dataclass
class Candidates:
    """The prompts of a run, and which of them were used in the current step.

    Later sampling rounds of a step, which replace filtered groups, draw unused prompts, or used ones if
    there are no others.
    """

    data: Sequence[Prompt]
    stream: Stream
    place: dict[str, int] = field(init=False)  # maps uid to index in `data`
    asked: Tensor = field(init=False)  # (M,) bool: used in `step`
    step: int | None = None

    def __post_init__(self) -> None:
        self.place = {uid: i for i, uid in enumerate(uids_of(self.data))}
        self.asked = torch.zeros(len(self.data), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.data)

    def begins(self) -> bool:
        """Return whether this is the first draw of a step; if so, mark all prompts as unused."""
        if self.step == self.stream.step:
            return False
        self.step = self.stream.step
        self.asked.zero_()
        return True

    def highest(self, scores: Tensor, num: int, name: str, among: Tensor | None = None) -> list[int]:
        """Choose up to `num` indices by the highest scores (M,), and mark them as used.

        Ties are broken at random. Indices outside the mask `among` (M,) come after the others, and indices
        used in this step come last. A score of -inf is never chosen.
        """
        num = min(num, int((scores > -math.inf).sum()))
        order = torch.randperm(len(scores), generator=self.stream.generator(name, "ties"))
        order = order[scores[order].argsort(descending=True, stable=True)]
        if among is not None:
            order = order[(~among[order]).int().argsort(stable=True)]
        order = order[self.asked[order].int().argsort(stable=True)]
        chosen = order[:num]
        self.asked[chosen] = True
        return chosen.tolist()

    def weighted(self, weights: Tensor, num: int, name: str) -> list[int]:
        """Draw up to `num` indices without replacement, proportional to weights (M,); marks them as used.

        Indices of weight 0 come after all others.
        """
        # Efraimidis and Spirakis: take the largest u^(1/w), in logarithms.
        uniform = torch.rand(len(weights), generator=self.stream.generator(name), dtype=torch.float64)
        keys = weights.double().log() - (-uniform.clamp(min=1e-300).log()).log()
        return self.highest(keys.clamp(min=-1e300), num, name, among=weights > 0)

    def fitting(self, saved: Tensor) -> Tensor:
        """Copy a saved tensor (M, ...); raises ValueError unless M is the number of prompts in the data."""
        if len(saved) != len(self):
            raise ValueError(
                f"the sampler's saved memory is about {len(saved)} prompts, but the data have {len(self)}; "
                "use the same data, or start with an empty memory"
            )
        return saved.clone()

    def prompts(self, places: Sequence[int], num_generations: int) -> list[Prompt]:
        """Return the prompts at these indices, each `num_generations` times."""
        return [self.data[i] for i in places for _ in range(num_generations)]

    def rows(self, table: RewardTable, known: Tensor) -> dict[int, Tensor]:
        """Map the index of each prompt to the indices of its rows in the table.

        Only rows in the mask `known` (N,) that the policy sampled count: recorded and replayed answers do not
        measure how hard a prompt is for the current policy.
        """
        rows: dict[int, list[int]] = {}
        counts = known & table.ids["on_policy"][:, 0].bool() if len(table) else known
        for row, (uid, counted) in enumerate(zip(table.uids, counts.tolist(), strict=True)):
            if counted and uid in self.place:
                rows.setdefault(self.place[uid], []).append(row)
        return {place: torch.tensor(listed) for place, listed in rows.items()}


def reward_of(table: RewardTable, of: str) -> Tensor:
    """Return the reward named `of` of each row (N,), or the weighted sum if empty; NaN if unknown."""
    return table.at_end(of) if of else table.reward()


def evenness(weights: Tensor) -> float:
    """Compute the normalised entropy of weights (M,): 1 for equal weights, 0 for a single weight."""
    shares = weights.double() / weights.sum().clamp(min=1e-300)
    entropy = -torch.special.xlogy(shares, shares).sum().item()
    return entropy / math.log(len(weights)) if len(weights) > 1 and weights.sum() > 0 else 1.0
