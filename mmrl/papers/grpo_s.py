"""GRPO-S of DR-IRL (arXiv 2503.18991): advantages are scaled against what is usual of a category.

Title: Inverse Reinforcement Learning with Dynamic Reward Scaling for LLM Alignment
Formula: A' = A sigmoid(x) / sigmoid(mean of x over the category), x the hardness or the gap of rewards.
Our reading: means are over all that a run has seen; a gap is the largest less the smallest reward of a
group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.types import Rollouts


@advantage
class CategoryScale:
    """Multiply advantages by sigmoid(x) / sigmoid(mean of x over the category) (DR-IRL, arXiv 2503.18991).

    For x the hardness of an answer this is the paper's alpha_D, for x the gap of rewards its alpha_M. The
    factors are positive, so that no sign flips. Our readings: the mean is over all that a run has seen of the
    category, this collection included; a gap is the largest less the smallest reward of a group, and the gap
    of a batch the mean over its answers of the category. An answer without the reward keeps its advantage.

    Args:
        of: Name of the reward or label.
        measure: x is the answer's own (`reward`), or the mean gap of rewards in this collection (`gap`).
        by: Tags that make a category; without any the whole data set is one.
    """

    def __init__(self, *, of: str, measure: Literal["reward", "gap"] = "reward", by: Tags = ()) -> None:
        self.of, self.measure, self.by = of, measure, by
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, table: RewardTable) -> RewardTable:
        """Scale the advantages."""
        batch = self._measured(table)
        x = (batch.values if self.measure == "reward" else batch.mean())[:, 0]
        usual = x.clone()  # of a category that was never observed: a factor of 1
        for key, member in self._categories(table):
            if key in self.counts:
                usual[member] = self.sums[key] / self.counts[key]
        factor = torch.where(batch.valid[:, 0], x.sigmoid() / usual.sigmoid(), 1.0)
        return table.put(table.values * factor[:, None])

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Add what a round of rollouts has of every category."""
        batch = self._measured(table)
        for key, member in self._categories(table):
            x = batch.values[:, 0][member & batch.valid[:, 0]]
            if x.numel():
                self.sums[key] = self.sums.get(key, 0.0) + float(x.sum())
                self.counts[key] = self.counts.get(key, 0) + x.numel()

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts of the categories."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums and counts."""
        self.sums, self.counts = dict(state["sums"]), dict(state["counts"])

    def _measured(self, table: RewardTable) -> GroupStatistics:
        """Return x of every answer, (N, 1, K), to be compared within its category."""
        if self.of not in table.scored:
            raise ValueError(f"no reward is called '{self.of}'; there are {', '.join(table.scored)}")
        x = table.scored[self.of][:, None]
        known = ~x.isnan()
        if self.measure == "gap":
            groups = GroupStatistics(x, known, table.index(BY_GROUP))
            x = groups.largest() - groups.smallest()
        return GroupStatistics(torch.where(known, x, 0.0), known, table.index(self.by))

    def _categories(self, table: RewardTable) -> Iterator[tuple[str, Tensor]]:
        """Yield every category, named by the ids of its tags, with its answers (N, K)."""
        index = table.index(self.by)
        for number in index.unique().tolist():
            member = index == number
            yield " ".join(str(int(table.tag(name)[member][0])) for name in self.by), member
