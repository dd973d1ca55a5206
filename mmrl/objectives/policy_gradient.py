"""The objective of the GRPO family: a surrogate of ratio and advantage, plus penalties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from mmrl.config.plain import as_list
from mmrl.config.registry import Needs, objective
from mmrl.config.schema import Piece
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit


@objective
@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """Minimise the weighted sum of a surrogate and penalties over all steps.

    Args:
        surrogate: Function that returns the loss of every step from log-ratio and advantage.
        aggregation: Function that returns the weight of every step in the loss.
        ratio: Function that returns the log-ratio of every step to the policy that sampled it.
        step_weight: Functions that return further factors of the weights.
        penalty: Per-step penalties, added to the surrogate.
    """

    surrogate: Callable
    aggregation: Callable
    ratio: Callable = Piece("step_ratio")
    step_weight: tuple[Callable, ...] = ()
    penalty: tuple[Callable, ...] = ()

    @property
    def needs(self) -> Needs:
        """The combined requirements of the pieces in the options, such as outputs of a reference."""
        return needs_of(self.ratio, self.surrogate, self.aggregation, self.step_weight, self.penalty)

    def weigh(self, batch: Batch) -> Tensor:
        """Return the weight (N, T) of every step; the loss is the weighted sum of the losses of all steps."""
        weight = self.aggregation(batch)
        for step_weight in as_list(self.step_weight):  # not renormalised: a weight of 2 counts twice
            weight = weight * step_weight(batch)
        return weight

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the contributions of a micro-batch to the loss and the metrics of the update."""
        log_ratio = self.ratio(new, batch)
        loss = self.surrogate(log_ratio, new, batch)
        for penalty in as_list(self.penalty):
            loss = loss + penalty(new, batch)
        metrics = {**diagnose(new, batch), **clipped_share(self.surrogate, log_ratio, new, batch)}
        return (loss * batch.weight).sum(), metrics


def needs_of(*pieces: Callable | tuple[Callable, ...]) -> Needs:
    """Return the combined requirements of pieces and of tuples of pieces."""
    return reduce(Needs.__or__, (piece.needs for several in pieces for piece in as_list(several)), Needs())


@torch.no_grad()
def diagnose(new: StepOutput, batch: Batch) -> dict[str, Tensor]:
    """Compute the mean KL (k3) to every reference, and the policy's distance from `old` and the engine."""
    steps = batch.totals.steps or 1.0
    metrics = {}
    if "old" in batch.others:
        gap = ((new.logp - batch.others["old"].logp) * batch.mask).clamp(-20, 20)
        metrics["ratio_variance"] = torch.expm1(gap).square().sum() / steps
    for name, other in batch.others.items():
        if name not in ("old", "engine"):
            gap = ((other.logp - new.logp) * batch.mask).clamp(max=20)  # log r; k3 = r - 1 - log r
            metrics["kl" if name == "ref" else f"kl/{name}"] = (
                (gap.exp() - gap - 1) * batch.mask
            ).sum() / steps
    if "logp" in batch.notes:
        old, noted = batch.by("old", new).logp, batch.notes["logp"]
        known = batch.mask * ~noted.isnan()  # (N, T); demonstrations have no records
        known = known * batch.notes.get("replayed", torch.full_like(known, torch.nan)).isnan()
        gap = torch.where(known > 0, old - noted.nan_to_num(), 0.0)
        metrics["sampling/sampling_logp_difference/mean"] = gap.abs().sum() / steps
        # KL (k3) between engine and policy at rollout time, due to caches or other precision in the engine.
        bounded = gap.clamp(max=20)
        metrics["sampling/kl"] = ((bounded.exp() - bounded - 1) * known).sum() / steps
        metrics |= _moments(gap, known, batch)
    return metrics


def _moments(gap: Tensor, known: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Compute moments 0, 1 and 2 of importance weights p_policy / p_engine, over steps and over answers.

    The effective sample size is computed from the moments of the whole update. There are no moments over
    answers if micro-batches can split rows.
    """
    inside, rows = known > 0, (known > 0).any(-1)
    weighed = [("steps", gap.clamp(max=20).exp()[inside], batch.totals.steps)]
    if batch.steps.unit >= Unit.ROW:
        weighed.append(("rows", gap.sum(-1).clamp(max=20).exp()[rows], batch.totals.rows))
    return {
        f"moments/{unit}/{power}": ratio.double().pow(power).sum() / (count or 1.0)
        for unit, ratio, count in weighed
        for power in (0, 1, 2)
    }


def clipped_share(surrogate: Callable, log_ratio: Tensor, new: StepOutput, batch: Batch) -> dict[str, Tensor]:
    """Compute the fraction of steps whose gradient is clipped, for ratios below and above 1.

    Steps of advantage 0 count as not clipped. Returns {} if the surrogate does not depend on the ratio.
    """
    with torch.enable_grad():
        leaf = log_ratio.detach().requires_grad_()
        moved = surrogate(leaf, new.detach(), batch)
        if not moved.requires_grad:
            return {}
        slope = torch.autograd.grad(moved.sum(), leaf)[0]  # exactly 0 where a clip is active
    still = ((slope == 0) & (batch.advantage != 0) & (batch.mask > 0)).to(leaf.dtype)
    steps = batch.totals.steps or 1.0
    low, high = (still * (leaf < 0)).sum() / steps, (still * (leaf > 0)).sum() / steps
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
