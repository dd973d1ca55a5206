"""A bonus for answers that need the order of the frames (T-GRPO of Video-R1)."""

from __future__ import annotations

import torch

from mmrl.advantages.shape import column_of
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable, name_id


@advantage
def temporal_contrast(
    table: RewardTable, *, of: str, min_ratio: NonNegativeFloat = 0.8, bonus: float = 0.3, above: float = 0.1
) -> RewardTable:
    """Add a bonus to correct answers that are not worse than those to shuffled frames (T-GRPO).

    arXiv 2503.21776. The rows that `vision.with_shuffled_frames` added are compared here and then leave
    their group: they count in no later statistic and are not learned from. Groups without such rows, of
    images, get no bonus. Put it before `total`, which multiplies the bonus by the weight of the reward.

    Args:
        of: Name of the reward that says whether an answer is correct, and that gets the bonus.
        min_ratio: Least mean reward for a bonus, as a share of the mean with shuffled frames.
        bonus: What is added.
        above: An answer is correct where the reward is larger than this.
    """
    place = column_of(table, of)
    frames = table.ids.get("frames", torch.zeros_like(table.ends))
    shuffled = (frames == name_id("shuffled")).any(-1)[:, None]  # (N, 1): the row as a whole
    reward, known = table.values[:, place], table.valid[:, place]  # (N, K) each
    index = table.index(("group", "place"))
    ordered, other = (
        GroupStatistics(reward[:, None], (known & rows)[:, None], index) for rows in (~shuffled, shuffled)
    )
    # A group without shuffled rows has the mean 0 there, which every group would reach.
    earned = (other.count() > 0) & (ordered.mean() >= min_ratio * other.mean())  # (N, 1, K)
    values = table.values.clone()
    right = earned[:, 0] & known & (reward > above) & ~shuffled
    values[:, place] = torch.where(right, reward + bonus, reward)
    return table.replace(values=values, valid=table.valid & ~shuffled[:, None], learn=table.learn & ~shuffled)
