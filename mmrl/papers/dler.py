"""DLER (arXiv 2510.15110): a length limit that is shorter for prompts with a higher success rate.

Title: DLER: Doing Length pEnalty Right - Incentivizing More Intelligence per Token via Reinforcement
Learning
Formula: limit = shortest + (longest - shortest) (1 - acc); the reward beyond it is 0.
Our reading: the formula, that acc is a running mean of the prompt's reward, and what merging keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from mmrl.advantages.shape import column_of
from mmrl.builders.merge_weights import MergeWeights
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import AtMost, PositiveInt, PositiveShare, ShareBelowOne
from mmrl.config.registry import advantage, builder
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Rollouts


@advantage
class DifficultyLimit:
    """Set a reward to 0 beyond a length that is shorter for prompts that are solved often (DLER).

    arXiv 2510.15110, of whose difficulty-aware form only the abstract is known. Our reading: the limit is
    shortest + (longest - shortest) (1 - acc), where acc is a running mean of the reward of the prompt, this
    collection included, from 0 to 1 and as measured, however long answers are. Put it before `total`, and
    have the engine cut answers at `longest` or later.

    Args:
        of: Name of the reward that says whether an answer is right, and that is set to 0.
        shortest: Limit in steps where all answers are right.
        longest: Limit where none is.
        decay: Of the running mean, over the times that a prompt is asked.
    """

    def __init__(
        self,
        *,
        of: str,
        shortest: Annotated[PositiveInt, AtMost("longest")] = 1000,
        longest: PositiveInt = 4000,
        decay: ShareBelowOne = 0.9,
    ) -> None:
        self.of, self.shortest, self.longest, self.decay = of, shortest, longest, decay
        self.means: dict[str, float] = {}  # by uid

    def __call__(self, table: RewardTable) -> RewardTable:
        """Set the reward of answers beyond their limit to 0."""
        place, limit = column_of(table, self.of), self.limits(table)
        values = table.values.clone()
        values[:, place] = torch.where(table.ends > limit[:, None], 0.0, values[:, place])
        return table.put(values)

    def limits(self, table: RewardTable) -> Tensor:
        """Return the limit of each row: (N,)."""
        means = torch.tensor([self.means.get(uid, 0.0) for uid in table.uids], dtype=torch.float64)
        return self.shortest + (self.longest - self.shortest) * (1 - means)

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the running means of the prompts of a round."""
        rewards: dict[str, list[float]] = {}
        for uid, value in zip(table.uids, table.at_end(self.of).tolist(), strict=True):
            if not math.isnan(value):
                rewards.setdefault(uid, []).append(min(max(value, 0.0), 1.0))
        for uid, values in rewards.items():
            mean = sum(values) / len(values)
            self.means[uid] = self.decay * self.means.get(uid, mean) + (1 - self.decay) * mean

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"means": dict(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running means."""
        self.means = dict(state["means"])


@builder
@dataclass(kw_only=True)
class UpdateSelectiveMerge(MergeWeights):
    """Merge a trained model into its base, keeping only the largest updates of every tensor (DLER).

    arXiv 2510.15110, for a model whose accuracy fell while its answers became short; only the abstract is
    known. Our reading: of every tensor, the `share` of entries that training moved farthest are the trained
    model's, all others the base's. Tensors are written in the precision of the base.

    Args:
        models: Two folders: the base, then the trained model.
        weights: Must stay empty.
        share: Fraction of the entries that keep their update.
    """

    share: PositiveShare = 0.5

    def __post_init__(self) -> None:
        if len(self.models) != 2 or self.weights:
            raise ConfigError("`models` must name the base and the trained model; there are no `weights`")
        super().__post_init__()

    def combine(self, name: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Take the trained entries that moved farthest, and those of the base elsewhere."""
        base, trained = tensors
        if not base.is_floating_point():
            return super().combine(name, tensors, weights)  # which raises if they differ
        wide = torch.promote_types(base.dtype, torch.float32)
        moved = (trained.to(wide) - base.to(wide)).abs().flatten()
        kept = moved.topk(math.ceil(self.share * len(moved))).indices
        merged = base.flatten().clone()
        merged[kept] = trained.flatten()[kept].to(base.dtype)
        return merged.view_as(base)
