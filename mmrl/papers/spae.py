"""SPAE (arXiv 2601.03823): credit steps that make the right answer more probable.

Title: Step Potential Advantage Estimation: Harnessing Intermediate Confidence and Correctness for Efficient
Mathematical Reasoning
Formula: P = 1.5 a c + 0.5 a - c; A (1 - alpha (1 - exp(-C))) + xi (exp(z) - mean exp(z)), z the change of P.
Our reading: changes are scaled over the collection, and what follows the last probe has none of its own.
"""

from __future__ import annotations

from typing import Annotated

import torch

from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Probability, Range
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def only_answers(table: RewardTable) -> RewardTable:
    """Remove the rewards of completed prefixes from the table.

    So answers are compared with answers; labels stay.
    """
    answers = torch.arange(table.ends.shape[1]) == table.last[:, None]
    return table.replace(valid=table.valid & answers[:, None])


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
