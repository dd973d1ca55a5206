"""An advantage function that adds a bounded bonus, computed from a reward or label of the answer."""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


@advantage
def capped_bonus(
    table: RewardTable,
    *,
    of: str,
    coef: float = 1.0,
    cap: NonNegativeFloat = 0.5,
    two_sided: bool = False,
    only_positive: bool = True,
    center: Literal["none", "length"] = "none",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Add a bonus of at most `cap` times |A| to each advantage A, so that no advantage changes its sign.

    The result is A + min(max(coef x, 0), cap |A|), where x is the value of the reward or label `of`. XRPO
    (arXiv 2510.06672) adds `novelty` to right answers (coef 2.5, cap 0.5); VERL (arXiv 2509.23808) adds its
    own signal to all answers. ASPO (arXiv 2508.19201) rewards early code: x is the position of the first code
    block, `two_sided` with `center: length`, coef -2 and cap 0.7. Answers without x get no bonus.

    Args:
        of: Name of x: a reward, or a label (a value that is computed for each answer, but not rewarded).
        coef: Factor of x.
        cap: Largest bonus, relative to the advantage.
        two_sided: Allow a negative bonus, down to -cap |A|.
        only_positive: Only answers with a positive advantage get a bonus.
        center: `none`: use x itself. `length`: use (x - mean of x) / mean length, where means are over the
            answers of the group that may get a bonus; a single answer then gets no bonus.
        by: Keys that define a group.
    """
    x = label(table, of).expand_as(table.values)
    eligible = table.valid & ~x.isnan() & ((table.values > 0) | (not only_positive))
    if center == "length":
        index = table.index(by)
        length = table.ends.double()[:, None].expand_as(x)
        length = GroupStatistics(length, eligible, index).mean().clamp(min=1)
        x = (x - GroupStatistics(x, eligible, index).mean()) / length
    bound = cap * table.values.abs()
    bonus = torch.where(eligible, coef * x, 0.0).maximum(-bound if two_sided else torch.zeros_like(bound))
    return table.put(table.values + bonus.minimum(bound))
