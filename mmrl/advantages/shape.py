"""Advantage functions that combine, shape, clip and scale rewards and advantages."""

from __future__ import annotations

import math

import torch

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


@advantage
def total(table: RewardTable) -> RewardTable:
    """Sum the weighted rewards of every answer.

    A reward that does not apply adds nothing; the total applies where at least one reward does.
    """
    return table.replace(
        values=table.weighted_sum()[:, None],
        valid=table.valid.any(1, keepdim=True),
        weights={"total": 1.0},  # already weighted: a second `total` changes nothing
    )


@advantage(reads_rewards=False)
def constant(table: RewardTable, *, value: float = 1.0) -> RewardTable:
    """Give every answer the same advantage, as for supervised fine-tuning on demonstrations.

    The run needs no rewards.
    """
    return table.replace(
        values=torch.full_like(table.ends[:, None], value, dtype=torch.float64),
        valid=table.present[:, None],
        weights={"constant": 1.0},
    )


@advantage
def pick(table: RewardTable, *, of: str) -> RewardTable:
    """Use one reward as the advantage; the others are only reported as metrics."""
    place = column_of(table, of)
    return table.replace(
        values=table.values[:, place : place + 1],
        valid=table.valid[:, place : place + 1],
        weights={of: 1.0},  # a single reward needs no weight
    )


def column_of(table: RewardTable, of: str) -> int:
    """Return the index of a reward in the table's values; raises `ValueError` for another name."""
    if of not in table.names:
        raise ValueError(f"the chain has no reward called '{of}' at this place; it has {table.names}")
    return table.names.index(of)


@advantage
def value_weights(table: RewardTable) -> RewardTable:
    """Add the labels `value` and `value_weight` = value / mean value of the row (VGPO, arXiv 2512.12387).

    Rewards do not change. Our reading: the weight is 1 where the mean is at most 1e-6, so no sign flips.
    Several rewards are summed as in `total`.
    """
    known = table.valid.any(1)
    value = table.weighted_sum()
    mean = torch.where(known, value, 0.0).sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    weight = torch.where(mean > 1e-6, value / mean.clamp(min=1e-6), 1.0)
    labels = {"value": value, "value_weight": weight}
    labels = {name: torch.where(known, column, torch.nan) for name, column in labels.items()}
    return table.replace(scored={**table.scored, **labels})


@advantage
def value_anchor(
    table: RewardTable, *, of: str = "value", k: float = 0.1, steps: NonNegativeInt = 5
) -> RewardTable:
    """Add `k` times a value Q to the advantages of the first `steps` steps (VGPO, arXiv 2512.12387).

    A group of equal rewards then still learns. The paper adds k std(Q) * Q / std(Q), which is 0 / 0 if all Q
    are equal; k Q is the same otherwise (our reading).

    Args:
        of: Name of the label that holds Q, such as `value`, which `value_weights` adds.
        k: Weight of Q.
        steps: Number of steps, from the start of a row, to whose advantages k Q is added.
    """
    if of not in table.scored:
        raise ValueError(
            f"`value_anchor` adds the label '{of}', but there are only {', '.join(table.scored)}; put "
            "`value_weights` before it"
        )
    early = table.present & (table.ends <= steps)  # ends are 1, 2, ... (see `per_step`)
    anchor = torch.where(early, table.scored[of].nan_to_num(), 0.0)
    return table.put(table.values + k * anchor[:, None])


@advantage
def tempsamp_shaping(
    table: RewardTable,
    *,
    of: str,
    threshold: float = 0.8,
    alpha1: NonNegativeFloat = 0.01,
    alpha2: NonNegativeFloat = 1.0,
) -> RewardTable:
    """Compress one reward above `threshold` and stretch it below (TempSamp-R1, arXiv 2509.18056, eq. 4).

    The reward r becomes threshold + alpha1 ln(r - threshold + 1) above the threshold, and threshold -
    (exp(alpha2 (threshold - r)) - 1) / (exp(alpha2) - 1) below. A perfect demonstration then no longer pushes
    every sampled answer below the mean. Our reading: only the IoU is shaped, not the format.

    Args:
        of: Name of the reward.
        threshold: Reward at which compression begins.
        alpha1: Slope of the logarithm above the threshold.
        alpha2: Rate of the exponential below the threshold.
    """
    place = column_of(table, of)
    reward = table.values[:, place]
    # At the threshold, both branches equal the threshold; near it, log1p and expm1 keep full precision.
    above = threshold + alpha1 * torch.log1p((reward - threshold).clamp(min=0))
    below = threshold - torch.expm1(alpha2 * (threshold - reward).clamp(min=0)) / math.expm1(alpha2)
    values = table.values.clone()
    values[:, place] = torch.where(reward >= threshold, above, below)
    return table.put(values)


@advantage
def tempsamp_downscale(
    table: RewardTable, *, of: str, factor: NonNegativeFloat = 0.8, max_reward: float = 1.0
) -> RewardTable:
    """Set one reward of off-policy rows to a fraction of its maximum (TempSamp-R1, arXiv 2509.18056, 3.2).

    Args:
        of: Name of the reward.
        factor: Fraction of the maximum.
        max_reward: Largest value that the reward can have.
    """
    place = column_of(table, of)
    values = table.values.clone()
    values[:, place] = torch.where(table.ids["on_policy"] == 1, values[:, place], factor * max_reward)
    return table.put(values)


@advantage
def tempsamp_anchor(
    table: RewardTable, *, lambda_off: float = 1.2, by: Tags = ("group", "place")
) -> RewardTable:
    """Set off-policy advantages to `lambda_off` times the best sampled one (arXiv 2509.18056, eq. 3).

    Advantage anchoring of TempSamp-R1. Put it after `{name: group_normalize, by: [group, place, on_policy]}`,
    which compares sampled rows only. If sampled rows tie, demonstrations have advantage 0; without sampled
    rows they keep their advantage.
    """
    sampled = (table.ids["on_policy"] == 1)[:, None]
    best = GroupStatistics(table.values, sampled & table.valid, table.index(by)).largest()
    anchored = torch.where(best.isfinite(), lambda_off * best, table.values)  # -inf without sampled rows
    return table.put(torch.where(sampled, table.values, anchored))


@advantage
def clip_advantage(table: RewardTable, *, max_advantage: NonNegativeFloat = 5.0) -> RewardTable:
    """Clip advantages to [-max_advantage, max_advantage]."""
    return table.put(table.values.clamp(-max_advantage, max_advantage))


@advantage
def scale_by(table: RewardTable, *, of: str) -> RewardTable:
    """Multiply advantages by an unweighted reward, such as a confidence, or by 0 where it does not apply."""
    if of not in table.scored:
        raise ValueError(f"no reward is called '{of}'; there are {', '.join(table.scored)}")
    return table.put(table.values * table.scored[of].nan_to_num()[:, None])


@advantage
def scale(table: RewardTable, *, factor: float = 0.2) -> RewardTable:
    """Multiply advantages by a constant.

    The default maps the range [-5, 5] of `clip_advantage` to [-1, 1], as in AWM (arXiv 2509.25050).
    """
    return table.put(table.values * factor)
