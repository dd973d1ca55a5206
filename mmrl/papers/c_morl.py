"""C-MORL (arXiv 2410.02236): maximise one reward while barriers keep the others above thresholds.

Title: C-MORL: Multi-Objective Reinforcement Learning through Efficient Discovery of Pareto Front
Formula: weight of a reward with the threshold d: 1 / (t s), with the slack s = max(J - d, floor) and its
mean J.
Our reading: J is a running mean; thresholds are given as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmrl.advantages.shape import column_of
from mmrl.config.ranges import PositiveFloat, ShareBelowOne
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Rollouts


@advantage
class Barrier:
    """Add rewards with a threshold to the others, the more the closer their mean is to it (C-MORL).

    arXiv 2410.02236: the objective is maximised subject to a mean reward of at least the threshold, by a
    logarithmic barrier. With J the running mean of a reward and d its threshold, its weight is 1 / (t s) with
    the slack s = max(J - d, floor), in place of its own; rewards without a threshold are added with theirs.
    Put it after `group_center`, which keeps the units that weights are in, and before `batch_normalize`. Our
    readings: the slack is that of the running mean, where the authors' code takes the batch's, and a
    threshold is given as a number; the command pareto-front prints those of a front. It reports
    `barrier/NAME/slack` and `barrier/NAME/weight`.

    Args:
        thresholds: The smallest mean reward by name.
        t: Sharpness of the barrier.
        floor: Smallest slack, so that the largest weight is 1 / (t floor).
        decay: Of the running mean, over rounds of collecting.
    """

    def __init__(
        self,
        *,
        thresholds: Mapping[str, float],
        t: PositiveFloat = 20.0,
        floor: PositiveFloat = 1e-3,
        decay: ShareBelowOne = 0.9,
    ) -> None:
        self.thresholds, self.t, self.floor, self.decay = dict(thresholds), t, floor, decay
        self.means: dict[str, float] = {}

    def __call__(self, table: RewardTable) -> RewardTable:
        """Sum the rewards; rewards with a threshold are weighted by their slack."""
        for name in self.thresholds:
            column_of(table, name)  # raises where there is none
        weights = {
            name: self.weight(name) if name in self.thresholds else weight
            for name, weight in table.weights.items()
        }
        return table.replace(
            values=table.replace(weights=weights).weighted_sum()[:, None],
            valid=table.valid.any(1, keepdim=True),
            weights={"total": 1.0},
        )

    def weight(self, name: str) -> float:
        """Return the weight of a constrained reward; 0 until it was observed."""
        return 1 / (self.t * self._slack(name, self.means[name])) if name in self.means else 0.0

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the running means of the constrained rewards."""
        for name in self.thresholds.keys() & table.scored.keys():
            if (mean := _mean(table, name)) is not None:
                before = self.means.get(name, mean)
                self.means[name] = self.decay * before + (1 - self.decay) * mean

    def pop_metrics(self) -> Mapping[str, float]:
        """Report slacks and weights."""
        slacks = {name: self._slack(name, mean) for name, mean in sorted(self.means.items())}
        metrics = {f"barrier/{name}/slack": slack for name, slack in slacks.items()}
        return metrics | {f"barrier/{name}/weight": 1 / (self.t * slack) for name, slack in slacks.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"means": dict(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running means."""
        self.means = dict(state["means"])

    def _slack(self, name: str, mean: float) -> float:
        return max(mean - self.thresholds[name], self.floor)


def _mean(table: RewardTable, name: str) -> float | None:
    """Average a reward over all outcomes that it applies to; None where there are none."""
    values = table.scored[name]
    known = values[~torch.isnan(values)]
    return float(known.mean()) if known.numel() else None
