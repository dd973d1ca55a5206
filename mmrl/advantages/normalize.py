"""Advantage functions that subtract a mean: of the group, of its other rows, or of all rows."""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.config.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable

BY_GROUP = ("group", "place")


@advantage
def group_center(
    table: RewardTable,
    *,
    by: Tags = BY_GROUP,
    shift: FiniteFloat = 0.0,
    singleton: Literal["zero", "raw"] = "zero",
) -> RewardTable:
    """Subtract the mean of the group (Dr. GRPO, arXiv 2503.20783).

    Args:
        by: Keys that define a group.
        shift: Added to the baseline, in units of reward. With AsymRE's -0.1 (arXiv 2509.24203) groups
            of equal rewards get an advantage too.
        singleton: Advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
    """
    groups = table.groups(by)
    centred = torch.where(groups.flat(), 0.0, table.values - groups.mean()) - shift
    alone = table.values if singleton == "raw" else 0.0
    return table.put(torch.where(groups.count() < 2, alone, centred))


@advantage
def group_normalize(
    table: RewardTable,
    *,
    by: Tags = BY_GROUP,
    scale: Literal["group", "batch"] = "group",
    std: Literal["unbiased", "population"] = "unbiased",
    eps: NonNegativeFloat = 1e-4,
    singleton: Literal["zero", "raw"] = "zero",
    damping: PositiveFloat = 1.0,
) -> RewardTable:
    """Subtract the mean of the group and divide by its standard deviation (GRPO, arXiv 2402.03300).

    Equal rewards give exactly 0.

    Args:
        by: Keys that define a group.
        scale: `group`: divide by the standard deviation of the group. `batch`: divide by the
            standard deviation of all rewards of the step (Lite PPO, arXiv 2508.08221).
        std: Divide squares by n - 1 (`unbiased`) or by n (`population`).
        eps: Added to the standard deviation.
        singleton: Advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
        damping: Factor of the standard deviation in groups with rows that the policy did not sample, such as
            replayed rows (alpha of R3, arXiv 2601.19620, which gives no value).
    """
    groups = table.groups(by)
    spread = (groups if scale == "group" else table.groups(())).std(std == "unbiased")  # groups(()): all rows
    foreign = (table.ids["on_policy"] != 1)[:, None].expand_as(table.values).double()
    mixed = (
        GroupStatistics(foreign, table.present[:, None].expand_as(table.valid), groups.index).largest() > 0
    )
    spread = torch.where(mixed, damping * spread, spread)
    # Set equal rewards to exactly 0: with eps 0, one rounding error would be divided by another.
    normalized = torch.where(groups.flat(), 0.0, (table.values - groups.mean()) / (spread + eps))
    alone = table.values if singleton == "raw" else 0.0
    return table.put(torch.where(groups.count() < 2, alone, normalized))


@advantage
def batch_normalize(table: RewardTable, *, by: Tags = (), eps: NonNegativeFloat = 1e-4) -> RewardTable:
    """Subtract the mean of the batch and divide by its standard deviation plus `eps`.

    After `per_step`, all tokens are averaged, so longer answers weigh more (REINFORCE++, arXiv 2501.03262,
    which adds 1e-8 under the root). After `total`, this is the last step of GDPO (arXiv 2601.05242). If there
    is only one entry, it keeps its value.
    """
    groups = table.groups(by)
    normalized = torch.where(groups.flat(), 0.0, (table.values - groups.mean()) / (groups.std() + eps))
    return table.put(torch.where(groups.count() < 2, table.values, normalized))


@advantage
def leave_one_out(
    table: RewardTable,
    *,
    by: Tags = BY_GROUP,
    scale: Literal["none", "group", "others"] = "none",
    std: Literal["unbiased", "population"] = "unbiased",
    eps: NonNegativeFloat = 1e-4,
    singleton: Literal["zero", "raw"] = "zero",
) -> RewardTable:
    """Subtract the mean of the other rows of the group (RLOO, arXiv 2402.14740).

    Args:
        by: Keys that define a group.
        scale: `none`: do not divide. `group`: divide by the standard deviation of the group. `others`: divide
            by the standard deviation of the other rows, unless it is 0 or undefined, as in NeMo-RL.
        std: Divide squares by n - 1 (`unbiased`) or by n (`population`).
        eps: Added to the standard deviation.
        singleton: Advantage of a group of one row: 0 (`zero`) or its reward (`raw`).
    """
    groups = table.groups(by)
    count, away = groups.count(), table.values - groups.mean()
    # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
    compared = away * count / (count - 1).clamp(min=1)
    if scale == "group":
        compared = compared / (groups.std(std == "unbiased") + eps)
    elif scale == "others":
        squares = groups.std(unbiased=False).square() * count  # S = sum of (r_j - mean)^2
        others = squares - away * compared  # S - n / (n - 1) (r - mean)^2: squares of the other rows
        divisor = (count - (2 if std == "unbiased" else 1)).clamp(min=1)  # n - 1 other rows
        spread = (others / divisor).sqrt()
        # If the other rewards are equal, `others` is only a rounding error, possibly below 0.
        compared = torch.where(others > 1e-12 * squares, compared / (spread + eps), compared)
    compared = torch.where(groups.flat(), 0.0, compared)
    alone = table.values if singleton == "raw" else 0.0
    return table.put(torch.where(count < 2, alone, compared))
