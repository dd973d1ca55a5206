"""Advantage functions that credit parts of an answer by the rewards of its completed prefixes."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from mmrl.advantages.notes import label
from mmrl.advantages.select import increments
from mmrl.config.ranges import NonNegativeFloat, Probability, Range
from mmrl.config.registry import advantage
from mmrl.core.reward_table import ABSENT, RewardTable


@advantage
def mean_by_end(table: RewardTable, *, best: bool = False) -> RewardTable:
    """Average the rewards of outcomes with the same end: the value of a prefix (SPO, arXiv 2505.23564).

    Labels are averaged too. A reward that does not apply to a completion is left out of the mean. With `best`
    the value is the largest reward instead of the mean: that of a prover that samples as many answers and
    keeps the best (PAV, arXiv 2410.08146).
    """
    ends, present = table.ends, table.present
    if not ends.numel():
        return table
    first = present.clone()
    first[:, 1:] &= ends[:, 1:] != ends[:, :-1]
    slot = (first.cumsum(1) - 1).clamp(min=0)  # (N, K): the new place of every outcome
    width = int(slot.max()) + 1

    def gathered(values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce (N, R, K) to (N, R, width), with whether anything is known there."""
        index = slot[:, None].expand_as(values)
        count = values.new_zeros(*values.shape[:2], width).scatter_add(2, index, known.to(values))
        if best:
            lowest = torch.full_like(count, -torch.inf)
            filled = torch.where(known, values, -torch.inf)
            return torch.where(count > 0, lowest.scatter_reduce(2, index, filled, "amax"), 0.0), count > 0
        total = torch.zeros_like(count).scatter_add(2, index, torch.where(known, values, 0.0))
        return total / count.clamp(min=1), count > 0

    values, valid = gathered(table.values, table.valid)
    # The last outcome of an end stands for all of them, as the answer does for its row.
    places = torch.zeros(len(table), width, dtype=torch.int64)
    at = torch.arange(ends.shape[1]).expand_as(ends)
    places.scatter_reduce_(1, slot, torch.where(present, at, 0), "amax")
    filled = torch.arange(width) < first.sum(1, keepdim=True)
    reduced = table.take(places, values, torch.where(filled, ends.gather(1, places), ABSENT))
    labels = {}
    for name, column in table.scored.items():
        mean, known = gathered(column[:, None], (present & ~column.isnan())[:, None])
        labels[name] = torch.where(known, mean, torch.nan)[:, 0]
    return reduced.replace(valid=valid & filled[:, None], scored=labels)


@advantage
def only_answers(table: RewardTable) -> RewardTable:
    """Leave the rewards of completed prefixes out of what follows: they no longer apply.

    So answers are compared with answers; labels stay.
    """
    answers = torch.arange(table.ends.shape[1]) == table.last[:, None]
    return table.replace(valid=table.valid & answers[:, None])


@advantage
def process_advantage(table: RewardTable, *, alpha: NonNegativeFloat = 3.0) -> RewardTable:
    """Give each part of an answer the answer's reward plus `alpha` times its progress (PAV).

    arXiv 2410.08146. `table.values` (N, R, K) are the values of prefixes by a prover, then the reward of the
    answer; the result is (N, R, K - 1). The progress of a part is the change of the value over it. Put it
    after `mean_by_end`. Our readings: the reward of the answer stands for Q, and the last change is that to
    its reward.
    """
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    reward, known = table.values.gather(2, last), table.valid.gather(2, last)
    progress = increments(table)
    return progress.replace(values=reward + alpha * progress.values, valid=progress.valid & known)


@advantage
def step_potential(
    table: RewardTable,
    *,
    of: str,
    confidence: str,
    alpha: Probability = 0.5,
    xi: NonNegativeFloat = 0.5,
    threshold: Annotated[float, Range(-1, 1)] = 0.9,
) -> RewardTable:
    """Damp steps after the answer is known, and credit steps that change its potential (SPAE).

    arXiv 2601.03823. The potential after step k is P = 1.5 a c + 0.5 a - c, with a the probability of the
    right answer and c the confidence of forced answers. A step has its answer's advantage times
    1 - alpha (1 - exp(-C)), where C counts earlier steps with a potential above `threshold`, plus
    xi (exp(z) - mean exp(z)), where z is the change of the potential, scaled to 0 to 1 over the collection;
    that of a first step is 0. Put it after `mean_by_end`, `only_answers` and `group_center`, before
    `batch_normalize`. Our readings: the scale is that of the collection, and what follows the last probe has
    no change of its own.

    Args:
        of: Name of the label with a: the `answer_probability` that `vision.with_prefix_rollouts` records.
        confidence: Name of the label with c: its `confidence`.
        alpha: Strength of the damping.
        xi: Weight of the change.
        threshold: Potential above which the answer counts as known (0.9 in the released script).
    """
    a, c = label(table, of)[:, 0], label(table, confidence)[:, 0]
    potential = 1.5 * a * c + 0.5 * a - c  # (N, K), NaN without a probe
    known = ~potential.isnan() & table.present
    reached = (known & (potential > threshold)).double()
    damping = 1 - alpha * (1 - (reached - reached.cumsum(-1)).exp())  # exp(-C), C without the step itself
    change = torch.zeros_like(potential)
    change[:, 1:] = potential.diff(dim=-1).nan_to_num()
    if known.any():
        low, high = change[known].min(), change[known].max()
        z = (change - low) / (high - low) if high > low else torch.zeros_like(change)
        bonus = torch.where(known, z.exp() - z[known].exp().mean(), 0.0)
    else:
        bonus = torch.zeros_like(change)
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    credit = table.values.gather(2, last) * damping[:, None] + xi * bonus[:, None]
    return table.replace(
        values=torch.where(table.present[:, None], credit, 0.0),
        valid=table.valid.gather(2, last) & table.present[:, None],
    )
