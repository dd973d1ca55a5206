"""Advantage functions over the checks of an answer, and over sets of answers."""

from __future__ import annotations

from typing import Annotated

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import clusters
from mmrl.config.ranges import BelowGenerations, NonNegativeFloat, PositiveFloat, PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.tensor import group_index, rarity


@advantage
def rarity_weights(
    table: RewardTable,
    *,
    alpha: NonNegativeFloat = 1.0,
    sigma: PositiveFloat = 0.2,
    eps: PositiveFloat = 1e-6,
    by: Tags = ("group",),
) -> RewardTable:
    """Add up checks of an answer, rare and isolated ones weighing more (VeRPO, arXiv 2601.03525).

    Every reward is a check that passes (1) or fails (0), such as a unit test. Check j with pass rate p_j in
    the group weighs exp(-alpha p_j) / (N_j + eps), where N_j = sum_l exp(-(p_j - p_l)^2 / (2 sigma^2)) counts
    checks of about its difficulty; its configured weight is a further factor. It stands for `total`, before
    `group_center`. The constants are our reading.

    Args:
        alpha: How much rarer passes weigh more.
        sigma: Distance of pass rates within which checks share their weight.
        eps: Added to the counts.
        by: Keys that define a group; pass rates are over all its outcomes.
    """
    groups = table.groups(by)
    # A check of another prompt does not count.
    weight = rarity(groups.mean(), groups.count() > 0, alpha=alpha, sigma=sigma, eps=eps)
    given = torch.tensor(list(table.weights.values()), dtype=torch.float64)[:, None]
    passed = torch.where(table.valid, table.values, 0.0)
    return table.replace(
        values=(given * weight * passed).sum(1, keepdim=True),
        valid=table.valid.any(1, keepdim=True),
        weights={"total": 1.0},
    )


@advantage
def set_baseline(
    table: RewardTable,
    *,
    of: str,
    size: Annotated[PositiveInt, BelowGenerations()] = 4,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Score sets of answers by success and diversity, and compare sets (Polychromic, arXiv 2509.25424).

    A set scores its mean reward times its share of distinct answers; the advantage of each member is that
    score less the mean score of the group's sets. Our reading: sets are `size` successive rows of a group,
    which all start from the prompt, and are not drawn again. Sets of one row make it `group_center`.

    Args:
        of: Name of the label that is equal for equal answers, such as `answer_cluster`; an answer without
            it is unlike all others.
        size: Number of answers of a set; the last set of a group may be smaller.
        by: Keys that define a group.
    """
    groups, index = table.groups(by), table.index(by)
    if 1 < (most := int(groups.count().max()) if table.valid.any() else 0) <= size:
        raise ValueError(
            f"`set_baseline` compares sets of {size} answers, but no group has more than {most}, so every "
            "advantage would be 0; set `size` lower, or ask for more rollouts of a prompt"
        )
    order = torch.arange(index.numel(), dtype=torch.float64).view(index.shape)[:, None]
    turn = GroupStatistics(order, table.present[:, None], index).rank()[:, 0]  # (N, K) in the group
    sets = group_index([index.flatten(), turn.div(size, rounding_mode="floor").flatten()]).view(index.shape)
    copies = GroupStatistics(table.values, table.valid, clusters(table, of, sets)).count().clamp(min=1)
    distinct = GroupStatistics(1 / copies, table.valid, sets).mean()  # (number of clusters) / (of answers)
    members = GroupStatistics(table.values, table.valid, sets)
    score = members.mean() * distinct
    once = table.valid & (members.rank() == 0)  # every set counts once
    mean = GroupStatistics(score, once, index).mean()
    return table.put(torch.where(groups.count() < 2, 0.0, score - mean))
