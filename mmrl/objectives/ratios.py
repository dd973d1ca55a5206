"""Log-ratios to the policy that sampled, per step or per row, always (N, T)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mmrl.config.registry import ratio
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit


@ratio
def step_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Log-ratio of every step (PPO, GRPO)."""
    return (new.logp - batch.by(against, new).logp) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_ratio(
    new: StepOutput, batch: Batch, *, against: str = "old", level: Literal["sequence", "token"] = "sequence"
) -> Tensor:
    """Mean log-ratio of the row, for each of its steps, at most 10 (GSPO, arXiv 2507.18071).

    `level: token` keeps that value but lets the gradient of every step through its own log-probability
    (GSPO-token), so that advantages may differ between steps. Use it with `sequence_mean`: `step_mean`
    would bring the lengths back in.
    """
    gap = step_ratio(new, batch, against=against)
    length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (gap.sum(-1, keepdim=True) / length).expand_as(gap)
    if level == "token":
        mean = mean.detach() + new.logp - new.logp.detach()
    return mean.clamp(max=10.0) * batch.mask


@ratio(unit=Unit.ROW)
def sequence_sum(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Summed log-ratio of the row, for each of its steps (RLOO, arXiv 2402.14740).

    It is the log-ratio of whole answers, limited to [-20, 20].
    """
    gap = step_ratio(new, batch, against=against)
    return gap.sum(-1, keepdim=True).expand_as(gap).clamp(-20.0, 20.0) * batch.mask
