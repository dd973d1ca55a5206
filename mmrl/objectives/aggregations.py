"""Aggregations: weights (N, T) of the losses of N rows and T steps; their weighted sum is the loss.

`batch.totals` are means over processes, so that losses are exact on any number of processes. They can be
below 1 if there are fewer rows than processes.

`count: drawn` divides by all rows after the group filter, including rows that advantage functions dropped, as
TRL does with `mask_truncated_completions`; by default dropped rows do not count.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import aggregation
from mmrl.core.step_table import Batch
from mmrl.core.types import Unit

Count = Literal["learned", "drawn"]


def _rows(batch: Batch, count: Count) -> float:
    """Return the number of rows that the loss is divided by; 1 without rows."""
    return (batch.totals.rows if count == "learned" else batch.totals.drawn) or 1.0


@aggregation
def sequence_mean(batch: Batch, *, count: Count = "learned") -> Tensor:
    """Average losses over the steps of a row, then over rows (GRPO)."""
    return batch.mask / batch.mask.sum(-1, keepdim=True).clamp(min=1) / _rows(batch, count)


@aggregation
def step_mean(batch: Batch) -> Tensor:
    """Average losses over all steps of the update, on all processes (DAPO, arXiv 2503.14476)."""
    return batch.mask / (batch.totals.steps or 1.0)  # so long rows weigh more


@aggregation
def fixed_length(batch: Batch, *, max_completion_length: PositiveInt, count: Count = "learned") -> Tensor:
    """Divide the summed losses by rows times a constant length (Dr. GRPO, arXiv 2503.20783)."""
    # Not divided by the row's own length, to avoid its length bias.
    return batch.mask / (_rows(batch, count) * max_completion_length)


@aggregation
def length_weighted(batch: Batch, *, count: Count = "learned") -> Tensor:
    """Sum losses over a row's steps, then average over rows (LUSPO, arXiv 2602.05261; seq-mean-token-sum)."""
    return batch.mask / _rows(batch, count)


@aggregation(unit=Unit.GROUP)  # divides by groups, so micro-batches must not split them
def group_mean(batch: Batch) -> Tensor:
    """Average losses over the steps of a row, sum over the rows of a group, and average over groups."""
    return batch.mask / batch.mask.sum(-1, keepdim=True).clamp(min=1) / (batch.totals.groups or 1.0)
