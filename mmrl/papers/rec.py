"""REC (arXiv 2509.24203): clipping selects the steps to learn from, without importance weights.

Title: Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths About GRPO and
Its Friends
Formula: loss = -1[ratio in range] A log p; the range is one-sided, two-sided or a ring.
Our reading: none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP, group_center
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Tags
from mmrl.config.registry import advantage, surrogate
from mmrl.core.reward_table import GroupStatistics, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput


@surrogate
def in_range(
    log_ratio: Tensor,
    new: StepOutput,
    batch: Batch,
    *,
    epsilon: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat | None = None,
    sides: Literal["one", "two", "ring"] = "one",
    outer_low: NonNegativeFloat = 0.6,
    outer_high: NonNegativeFloat = 2.0,
    weight: Literal["none", "ratio", "advantage"] = "none",
    temperature: PositiveFloat = 1.0,
) -> Tensor:
    """Minus log-probability times advantage, of steps whose ratio is in a range (REC, arXiv 2509.24203).

    The ratio decides alone which steps are learned from; others cost nothing. With `sides: one` and `weight:
    ratio` the gradient is that of `clip`.

    Args:
        epsilon: Lower end of the range, 1 - epsilon, and the upper one where `epsilon_high` is null.
        epsilon_high: Upper end, 1 + epsilon_high.
        sides: Drop a step beyond the end to which its advantage moves it (`one`), or beyond either (`two`);
            `ring` keeps the range, and beyond its outer ends the steps that their advantages move back.
        outer_low: The ring's lower outer end, 1 - outer_low: steps of advantage 0 or more are kept below it.
        outer_high: The upper one, 1 + outer_high: steps of advantage 0 or less are kept above it.
        weight: Factor of a step: 1 (`none`), its ratio as a constant, or exp(A / temperature) (`advantage`).
            With the ratio `sequence_ratio` range and factor are those of whole answers.
        temperature: Divisor of the advantage A in its exponent, which counts up to 20.
    """
    value, good = log_ratio.detach().clamp(-20.0, 20.0).exp(), batch.advantage > 0
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    if sides == "one":
        kept = torch.where(good, value <= high, (value >= low) | (batch.advantage == 0))
    else:
        kept = (value >= low) & (value <= high)
    if sides == "ring":
        kept |= (value <= 1 - outer_low) & (batch.advantage >= 0)
        kept |= (value >= 1 + outer_high) & (batch.advantage <= 0)
    tilt = (batch.advantage / temperature).clamp(-20.0, 20.0).exp()
    factor = {"none": torch.ones_like(value), "ratio": value, "advantage": tilt}[weight]
    return -torch.where(kept, factor, 0.0) * batch.advantage * new.logp


@advantage
def balanced_center(table: RewardTable, *, stream: Stream, by: Tags = BY_GROUP) -> RewardTable:
    """Subtract the mean of the group after leaving random surplus negatives out (REC, arXiv 2509.24203).

    Negatives are rewards below the mean of the group; where there are more of them than of rewards above it,
    as many as exceed these are drawn, have the advantage 0 and no part in the mean. They stay in
    denominators. The drop of REC's code: `balance`.
    """
    groups = table.groups(by)
    away = torch.where(groups.flat(), 0.0, table.values - groups.mean())
    above, below = table.valid & (away > 0), table.valid & (away < 0)
    count = lambda chosen: GroupStatistics(table.values, chosen, groups.index).count()
    draws = torch.rand(table.values.shape, generator=stream.generator("balanced_center"), dtype=torch.float64)
    order = GroupStatistics(draws, below, groups.index).rank()
    dropped = below & (order < count(below) - count(above))
    kept = group_center(table.replace(valid=table.valid & ~dropped), by=by)
    return table.put(torch.where(dropped, 0.0, kept.values))
