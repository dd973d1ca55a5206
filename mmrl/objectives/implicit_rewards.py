"""Implicit rewards of single steps, all (N, T); a comparison sums them over the steps of a row."""

from __future__ import annotations

from torch import Tensor

from mmrl.config.registry import implicit_reward
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit


def _share(batch: Batch) -> Tensor:
    """Divide by the length of the row: (N, 1)."""
    return 1.0 / batch.mask.sum(-1, keepdim=True).clamp(min=1)


@implicit_reward
def log_ratio(new: StepOutput, batch: Batch, *, against: str = "ref") -> Tensor:
    """DPO's implicit reward without beta: the log-ratio to another policy (arXiv 2305.18290)."""
    return new.logp - batch.by(against, new).logp


@implicit_reward
def logp(new: StepOutput, batch: Batch) -> Tensor:
    """Log-probability: an implicit reward without a reference (SLiC, arXiv 2305.10425; CPO, 2401.08417)."""
    return new.logp


@implicit_reward(unit=Unit.ROW)
def mean_log_ratio(new: StepOutput, batch: Batch, *, against: str = "ref") -> Tensor:
    """Mean log-ratio of a row to another policy; each step adds its share (TRL's `sigmoid_norm`)."""
    return (new.logp - batch.by(against, new).logp) * _share(batch)


@implicit_reward(unit=Unit.ROW)
def mean_logp(new: StepOutput, batch: Batch) -> Tensor:
    """Mean log-probability of a row; each step adds its share (SimPO, arXiv 2405.14734).

    DisCO's log-likelihood score (arXiv 2505.12366) is the same.
    """
    return new.logp * _share(batch)


@implicit_reward(unit=Unit.ROW)
def mean_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Mean probability ratio of a row to another policy (DisCO's ratio score, arXiv 2505.12366).

    Log-ratios are limited to [-20, 20].
    """
    gap = ((new.logp - batch.by(against, new).logp) * batch.mask).clamp(-20.0, 20.0)
    return gap.exp() * _share(batch)
