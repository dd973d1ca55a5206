"""Nemotron-Cascade (arXiv 2512.13607): average the loss over all steps of a group.

Title: Nemotron-Cascade: Scaling Cascaded Reinforcement Learning for General-Purpose Reasoning Models
Formula: L = mean over groups of (sum of step losses / number of steps of the group).
Our reading: none.
"""

from __future__ import annotations

from torch import Tensor

from mmrl.config.registry import aggregation
from mmrl.core.step_table import Batch
from mmrl.core.tensor import group_index, group_sum
from mmrl.core.types import Unit


@aggregation(unit=Unit.GROUP)  # the steps of a group are counted, so none may be cut
def group_step_mean(batch: Batch) -> Tensor:
    """Average over all steps of a group, then over groups (Nemotron-Cascade, arXiv 2512.13607)."""
    index = group_index([batch.group])
    steps = group_sum(batch.mask.sum(-1, keepdim=True), index)[index]  # (N, 1), of each row's group
    return batch.mask / steps.clamp(min=1) / (batch.totals.groups or 1.0)
