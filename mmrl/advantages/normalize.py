"""Comparing rewards: with the mean of the group, of the others in the group, or of the whole collection."""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable

BY_GROUP = ("group", "place")


@advantage
def group_center(
    table: RewardTable,
    *,
    by: tuple[str, ...] = BY_GROUP,
    shift: float = 0.0,
    singleton: Literal["zero", "raw"] = "zero",
) -> RewardTable:
    """Subtract the mean of the group (Dr. GRPO, arXiv 2503.20783).

    `shift` raises the baseline (AsymRE, arXiv 2509.24203, uses -0.1; then even equal rewards keep an
    advantage). A group of one gives 0, or with `singleton: raw` its reward.
    """
    groups = table.groups(by)
    centred = torch.where(groups.flat(), 0.0, table.values - groups.mean()) - shift
    alone = table.values if singleton == "raw" else torch.zeros_like(centred)
    return table.put(torch.where(groups.count() < 2, alone, centred))


@advantage
def group_normalize(
    table: RewardTable,
    *,
    by: tuple[str, ...] = BY_GROUP,
    scale: Literal["group", "batch"] = "group",
    std: Literal["unbiased", "population"] = "unbiased",
    eps: NonNegativeFloat = 1e-4,
    singleton: Literal["zero", "raw"] = "zero",
) -> RewardTable:
    """Subtract the mean of the group and divide by its standard deviation plus `eps` (GRPO, arXiv
    2402.03300).

    `scale: batch` divides by the deviation of all rewards of the collection instead (Lite PPO, arXiv
    2508.08221). Equal rewards give exactly 0; a group of one gives 0, or with `singleton: raw` its reward.
    """
    groups = table.groups(by)
    spread = (groups if scale == "group" else table.groups(())).std(std == "unbiased")
    normalized = torch.where(groups.flat(), 0.0, (table.values - groups.mean()) / (spread + eps))
    alone = table.values if singleton == "raw" else torch.zeros_like(normalized)
    return table.put(torch.where(groups.count() < 2, alone, normalized))


@advantage
def batch_normalize(
    table: RewardTable, *, by: tuple[str, ...] = (), eps: NonNegativeFloat = 1e-4
) -> RewardTable:
    """Subtract the mean of the collection and divide by its standard deviation plus `eps`.

    Behind `per_step` this whitens over tokens, so longer answers weigh more (REINFORCE++, arXiv 2501.03262,
    where eps is 1e-8 under the root); behind `total` it is the last step of GDPO (arXiv 2601.05242). A single
    entry keeps its value.
    """
    groups = table.groups(by)
    normalized = torch.where(groups.flat(), 0.0, (table.values - groups.mean()) / (groups.std() + eps))
    return table.put(torch.where(groups.count() < 2, table.values, normalized))


@advantage
def leave_one_out(
    table: RewardTable,
    *,
    by: tuple[str, ...] = BY_GROUP,
    scale: Literal["none", "group", "others"] = "none",
    std: Literal["unbiased", "population"] = "unbiased",
    eps: NonNegativeFloat = 1e-4,
    singleton: Literal["zero", "raw"] = "zero",
) -> RewardTable:
    """Subtract the mean of the others in the group (RLOO, arXiv 2402.14740). Alone, the advantage is 0, or
    the reward.

    `scale` divides by the standard deviation of the group, or of the others in it, plus `eps`. Where the
    others are one or all equal, nothing is divided, as in NeMo-RL.
    """
    groups = table.groups(by)
    count, away = groups.count(), table.values - groups.mean()
    # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
    compared = away * count / (count - 1).clamp(min=1)
    if scale == "group":
        compared = compared / (groups.std(std == "unbiased") + eps)
    elif scale == "others":
        squares = groups.std(unbiased=False).square() * count
        others = squares - away * compared  # about their own mean
        divisor = (count - (2 if std == "unbiased" else 1)).clamp(min=1)
        spread = (others / divisor).sqrt()
        # What is left of equal rewards is rounding, perhaps below 0.
        compared = torch.where(others > 1e-12 * squares, compared / (spread + eps), compared)
    compared = torch.where(groups.flat(), 0.0, compared)
    alone = table.values if singleton == "raw" else torch.zeros_like(compared)
    return table.put(torch.where(count < 2, alone, compared))
