"""What a step adds to the evidence for its row, all (N, T). A comparison adds the steps of a row up."""

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
    """Measure how much likelier a step became than under another policy: DPO's implicit reward, without its
    beta (arXiv 2305.18290)."""
    return new.logp - batch.by(against, new).logp


@implicit_reward
def logp(new: StepOutput, batch: Batch) -> Tensor:
    """Take the log-probability itself: a comparison without a reference (SLiC, arXiv 2305.10425; CPO, arXiv
    2401.08417)."""
    return new.logp


@implicit_reward(unit=Unit.ROW)
def mean_log_ratio(new: StepOutput, batch: Batch, *, against: str = "ref") -> Tensor:
    """Take the mean log-ratio of a row to another policy: each step adds its share (TRL's `sigmoid_norm`)."""
    return (new.logp - batch.by(against, new).logp) * _share(batch)


@implicit_reward(unit=Unit.ROW)
def mean_logp(new: StepOutput, batch: Batch) -> Tensor:
    """Take the mean log-probability of a row: each step adds its share (SimPO, arXiv 2405.14734; DisCO's
    log-likelihood score, arXiv 2505.12366)."""
    return new.logp * _share(batch)


@implicit_reward(unit=Unit.ROW)
def mean_ratio(new: StepOutput, batch: Batch, *, against: str = "old") -> Tensor:
    """Take the mean ratio to another policy over a row (DisCO's ratio score, arXiv 2505.12366). Log-ratios
    are held within 20 of 0."""
    gap = ((new.logp - batch.by(against, new).logp) * batch.mask).clamp(-20.0, 20.0)
    return gap.exp() * _share(batch)
