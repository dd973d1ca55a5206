"""ETR (arXiv 2601.03723): clip ranges that grow with the advantage and with the variance of the group.

Title: ETR: Outcome-Guided Elastic Trust Regions for Policy Optimization
Formula: width = (1 + by_advantage min(|A| / reference, 1)) (1 + by_variance min(1, 4 var / span^2)), in
[0.5, 3].
Our reading: throughout, since only the abstract was read.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable, place_of_steps


@advantage
def variance_width(
    table: RewardTable,
    *,
    of: str,
    span: PositiveFloat = 1.0,
    by_advantage: NonNegativeFloat = 0.5,
    by_variance: NonNegativeFloat = 0.5,
    reference: PositiveFloat = 2.0,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Widen clip ranges with the size of the advantage and the variance of the group (ETR).

    Our reading of arXiv 2601.03723, of which only the abstract was read: the factor of both ranges is
    (1 + by_advantage min(|A| / reference, 1)) (1 + by_variance min(1, 4 var / span^2)), between 0.5 and 3.
    Put it last, and use the surrogate `elastic_clip`.

    Args:
        of: Name of the reward whose variance (over n) counts.
        span: Largest less smallest value of that reward.
        by_advantage: Gain from an advantage of at least `reference`.
        by_variance: Gain from a group with half of its rewards at either end.
        reference: Advantage from which that gain no longer grows.
        by: Keys that define a group.
    """
    measured, index = label(table, of), table.index(by)
    spread = GroupStatistics(measured, ~measured.isnan(), index).std(unbiased=False)
    variance = (4 * spread.square() / span**2).clamp(max=1)[:, 0]  # (N, K)
    table, places = per_step(table), place_of_steps(table.ends, table.longest)
    variance = variance.gather(1, places)
    size = torch.where(table.valid, table.values, 0.0).abs().amax(1)
    factor = (1 + by_advantage * (size / reference).clamp(max=1)) * (1 + by_variance * variance)
    factor = torch.where(table.present, factor.clamp(0.5, 3), 1.0)  # 1 beyond a row's steps
    return table.note("clip_low", factor).note("clip_high", factor)
