"""SSL (arXiv 2601.22491): add a bonus in tiers of proximity to the outcome reward.

Title: SSL: Sweet Spot Learning for Differentiated Guidance in Agentic Optimization
Formula: reward + alpha min(floor(zones s), zones - 1) / (zones - 1), with the proximity s in [0, 1].
Our reading: the bounds of the zones and `alpha`.
"""

from __future__ import annotations

from typing import Annotated

import torch

from mmrl.config.ranges import Range, ShareBelowOne
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, RewardTable


@advantage
def tiers(
    table: RewardTable,
    *,
    of: str,
    outcome: str,
    zones: Annotated[int, Range(2)] = 4,
    alpha: ShareBelowOne = 0.2,
    only_if_correct: bool = False,
) -> RewardTable:
    """Add `alpha` times a proximity in zones to the reward of an outcome (SSL, arXiv 2601.22491).

    A proximity s in [0, 1] becomes min(floor(zones s), zones - 1) / (zones - 1): our reading, as is `alpha`.
    Raises ValueError where the outcomes of a collection are so close that the bonus could reverse their
    order, and where a proximity is outside of [0, 1].

    Args:
        of: Name of the reward that measures the proximity, usually a label (weight 0).
        outcome: Name of the reward of the outcome, such as 1 for a correct answer and 0 for others.
        zones: Number of zones.
        alpha: Bonus of the nearest zone; less than the smallest gap between outcomes, so that their order
            stays.
        only_if_correct: Whether an outcome of 0 or less gets no bonus.
    """
    if outcome not in table.names or of not in table.scored:
        wrong, known = (of, table.scored) if outcome in table.names else (outcome, table.names)
        raise ValueError(f"`tiers` reads '{wrong}', but the chain has {', '.join(known)} at this place")
    place = table.names.index(outcome)
    proximity, reward = table.scored[of], table.values[:, place]
    known = table.valid[:, place] & ~proximity.isnan()
    near = proximity[known]
    if ((near < 0) | (near > 1)).any():
        raise ValueError(f"`tiers` wants '{of}' in [0, 1], got {near.min():g} to {near.max():g}")
    levels = reward[table.valid[:, place]].unique()  # in ascending order
    gaps = levels.diff()[levels.diff() > EQUAL]
    if len(gaps) and gaps.min() <= alpha:
        raise ValueError(
            f"`tiers` adds up to alpha = {alpha:g}, but outcomes of '{outcome}' are only {gaps.min():g} "
            "apart, so their order could change; take a smaller `alpha`"
        )
    bonus = alpha * (zones * proximity).floor().clamp(max=zones - 1) / (zones - 1)
    earns = known & (reward > 0) if only_if_correct else known
    values = table.values.clone()
    values[:, place] = reward + torch.where(earns, bonus, 0.0)
    return table.put(values)
