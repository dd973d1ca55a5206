"""VERL (arXiv 2509.23808): a bonus for answers whose hidden states gain effective rank.

Title: Beyond the Exploration-Exploitation Trade-off: A Hidden State Approach for LLM Reasoning in RLVR
Formula: w tanh(d_rank) + (1 - w) tanh(d_velocity), w = sigmoid(gain d_acceleration).
Our reading: no bonus for answers too short for an acceleration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(others={"old"}, of_others={"effective_rank"})
class RankVelocity:
    """Record how the rank of hidden states grows along an answer, as a label (VERL, arXiv 2509.23808).

    The label `rank_velocity` is w tanh(d_rank) + (1 - w) tanh(d_velocity) with w = sigmoid(gain
    d_acceleration). Each d is the relative distance, within [-5, 5], of an answer's mean to that of earlier
    collections: of effective ranks R_j of growing prefixes, of velocities R_j - mean(R_0 .. R_(j-1)), and of
    differences of successive velocities. Values stay; put `{name: capped_bonus, of: rank_velocity,
    only_positive: false}` after it. In the first collection there is no label, and our reading is that there
    is none for an answer too short for an acceleration (see the policy's `rank_stride`).

    Args:
        gain: Gain of the acceleration.
        decay: Share of the earlier means that stays in the moving averages.
    """

    def __init__(self, *, gain: NonNegativeFloat = 2.0, decay: Probability = 0.7) -> None:
        self.gain, self.decay = gain, decay
        self.means, self.seen = torch.zeros(3, dtype=torch.float64), 0

    def __call__(self, table: RewardTable) -> RewardTable:
        """Record the label."""
        if self.seen:
            away = (rank_motion(table) - self.means) / (self.means.abs() + 1e-8)  # (N, 3)
            rank, velocity, acceleration = away.clamp(-5, 5).unbind(1)
            weight = torch.sigmoid(self.gain * acceleration)
            signal = weight * torch.tanh(rank) + (1 - weight) * torch.tanh(velocity)
        else:
            signal = torch.full((len(table),), torch.nan, dtype=torch.float64)
        spread = torch.where(table.present, signal[:, None], torch.nan)
        return table.replace(scored={**table.scored, "rank_velocity": spread})

    def observe_advantages(self, credit: RewardTable) -> None:
        """Move the averages towards the means of a collection."""
        motion = rank_motion(credit)
        motion = motion[motion.isfinite().all(1)]
        if len(motion):
            kept = self.decay if self.seen else 0.0
            self.means = kept * self.means + (1 - kept) * motion.mean(0)
            self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of collections in them."""
        return {"means": self.means, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages and the number of collections in them."""
        self.means, self.seen = state["means"], state["seen"]


def rank_motion(table: RewardTable) -> Tensor:
    """Average effective ranks, their velocities and accelerations over each row: (N, 3), NaN without any."""
    motion = torch.full((len(table), 3), torch.nan, dtype=torch.float64)
    for row, note in enumerate(table.notes["old/effective_rank"]):
        ranks = note[~note.isnan()]
        if len(ranks) < 3:
            continue
        before = ranks.cumsum(0)[:-1] / torch.arange(1, len(ranks))
        velocity = ranks[1:] - before
        motion[row] = torch.stack([ranks.mean(), velocity.mean(), velocity.diff().mean()])
    return motion
