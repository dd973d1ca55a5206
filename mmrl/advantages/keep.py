"""Advantage functions that exclude steps or rows.

A masked step has advantage 0 and still counts in denominators; a dropped row leaves them.
"""

from __future__ import annotations

import torch

from mmrl.advantages.places import per_step
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id
from mmrl.core.tensor import pad_to


@advantage(notes={"entropy"})
def high_entropy(table: RewardTable, *, top: Probability = 0.2) -> RewardTable:
    """Mask all steps but the `top` share of highest entropy in the collection (arXiv 2506.01939).

    The quantile is taken over the steps as they were sampled. Masked steps stay in every denominator. Steps
    without a recorded entropy (demonstrations) are not ranked and keep their advantage: our reading.
    """
    table = per_step(table)
    entropy = pad_to(table.notes["entropy"], table.ends.shape[1], 1, float("nan"))[:, : table.ends.shape[1]]
    ranked = table.present & ~entropy.isnan()
    if not ranked.any():
        return table
    cutoff = entropy[ranked].quantile(1 - top)
    kept = ~ranked | (entropy >= cutoff)
    return table.put(torch.where(kept[:, None], table.values, 0.0))


@advantage
def drop_truncated(table: RewardTable) -> RewardTable:
    """Drop answers that were cut at the length limit (DAPO's overlong filter).

    TRL calls it `mask_truncated_completions`.
    """
    if "finish" not in table.ids:
        return table
    cut = (table.ids["finish"] == name_id("length")).any(-1, keepdim=True)
    return table.replace(learn=table.learn & ~cut)


@advantage
def drop_zero(table: RewardTable) -> RewardTable:
    """Drop rows whose advantage is 0 at every step (Flow-GRPO, arXiv 2505.05470).

    Penalties do not act on dropped rows.
    """
    moved = (table.valid & (table.values != 0)).any((1, 2))
    return table.replace(learn=table.learn & moved[:, None])
