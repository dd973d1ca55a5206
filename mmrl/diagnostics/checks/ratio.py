"""Startup checks that policy and engine agree on the log-probabilities of the first rollouts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import check, find
from mmrl.diagnostics.context import Examined, Finding, lossy_pieces, spelled
from mmrl.runtime.modules import evaluating

ALIGN = (
    "compare labels (shifted by one?), temperature, guidance and schedule of engine and policy; training is "
    "meaningless until then"
)


@check(on="start")
def initial_ratio(
    examined: Examined, *, tolerance: NonNegativeFloat = 1e-3, max_kl: NonNegativeFloat = 0.1
) -> Iterator[Finding]:
    """Check that the ratio of policy to engine is 1 before the first update.

    If it is not, the check computes log-probabilities again to find the cause: in evaluation mode, row by
    row, in float32, and shifted by a step. The first variant with a ratio of 1 reveals the cause. For an
    engine that is less exact on purpose (caches, transforms), only a KL above `max_kl` is an error.

    Args:
        tolerance: Largest mean absolute difference of log-probabilities, in nats.
        max_kl: Largest KL between an inexact engine and the policy, in nats per step.
    """
    noted = examined.rows.notes.get("logp")
    if noted is None:
        return
    valid = (examined.rows.mask > 0) & ~noted.isnan()
    if not valid.any():
        return
    logp = examined.replay()
    # `unsteady`: difference of two identical passes, above 0 if the policy is random (dropout).
    difference, unsteady = _difference(logp, noted, valid), _difference(logp, examined.replay(), valid)
    lossy = lossy_pieces(examined.config)
    if lossy and unsteady <= tolerance:
        gap = torch.where(valid.cpu(), logp - noted.cpu().double().nan_to_num(), 0.0).clamp(-20, 20)
        kl = float((gap.exp() - gap - 1).sum() / valid.sum())  # k3: exp(d) - d - 1, d the log-ratio
        # The weight w of an answer is the product of the ratios of its steps. The effective fraction of n
        # answers is (sum w)^2 / (n sum w^2) (Kish).
        weight = gap.sum(1).clamp(-20, 20).exp()
        share = float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
        what = (
            f"rollouts are cheaper than the policy on purpose ({', '.join(lossy)}): log-probabilities differ "
            f"by {difference:.3g} on average, KL {kl:.3g} nats a step, and weighed answers are worth "
            f"{share:.0%} of as many exact ones"
        )
        if kl > max_kl:
            yield Finding(
                what, "that is far: give the engine more bits or drop less, or leave both out to compare"
            )
        else:
            measure = "`compression.speedup_probe` around the engine measures the seconds saved"
            yield Finding(what, measure, grave=False)
    elif max(difference, unsteady) > tolerance:
        what = (
            f"the ratio is not 1 before the first update: log-probabilities of engine and policy differ by "
            f"{difference:.3g} on average"
        )
        cause, advice = _cause(examined, noted, valid, unsteady > 1e-9, tolerance)
        yield Finding(what + cause, advice)


@check(on="start")
def importance_correction(examined: Examined) -> Iterator[Finding]:
    """Check that the objective has an importance correction if the engine is less exact than the policy."""
    lossy, objective = lossy_pieces(examined.config), examined.config.objective
    weighs = "step_weight" in find("objective", objective.name).options
    if lossy and weighs and "engine" not in examined.needs.others:
        yield Finding(
            f"rollouts come from a cheaper model than the one that learns ({', '.join(lossy)}), and nothing "
            "corrects for it",
            "add `truncated_importance` to objective.step_weight, as methods/*/importance_*.yaml do",
        )


def _cause(
    examined: Examined, noted: Tensor, valid: Tensor, unsteady: bool, tolerance: float
) -> tuple[str, str]:
    """Find the change that makes policy and engine agree; return the cause and advice as text."""
    policy = examined.policy
    # Try the cheap variants first: one pass, one pass per row, new rollouts in float32.
    with evaluating(policy.module):
        calm = examined.replay()
    if unsteady or _difference(calm, noted, valid) <= tolerance:
        parts = [
            name or type(part).__name__
            for name, part in policy.module.named_modules()
            if part.training and "Dropout" in type(part).__name__ and getattr(part, "p", 0) > 0
        ]
        cause = f"dropout is on in {spelled(parts)}" if parts else "something in the policy draws numbers"
        return f", because {cause}", "put the model into evaluation mode, or set its dropout to 0"
    if _difference(examined.replay(row_by_row=True), noted, valid) <= tolerance:
        return (
            ", but not when rows are asked one at a time: it depends on the batch size",
            "look at padding, masks and positions; until then lower learn.micro_batch_steps",
        )
    exact = examined.again(dtype="float32")
    if exact is not None and (fresh := exact.rows.notes.get("logp")) is not None:
        defined = (exact.rows.mask > 0) & ~fresh.isnan()
        if _difference(exact.replay(), fresh, defined) <= tolerance:
            dtype = examined.config.policy.options.get("dtype", "its default dtype")
            return (
                f", but not in float32: it is the precision of {dtype}",
                "set policy.dtype=float32, or accept it with objective.step_weight=[truncated_importance] "
                "and a clip range well above it",
            )
    # To detect shifted labels, compare column t of the policy with column t - shift of the engine.
    steps = valid.shape[1]
    for shift, side in ((1, "earlier"), (-1, "later")):
        low, high = max(0, shift), min(steps, steps + shift)
        both = valid[:, low:high] & valid[:, low - shift : high - shift]
        shifted = noted[:, low - shift : high - shift]
        if both.any() and _difference(calm[:, low:high], shifted, both) <= tolerance:
            return f": the log-probabilities of the policy belong one step {side}", ALIGN
    tried = "in evaluation mode, row by row" + (" and in float32" if exact is not None else "")
    return f", also {tried}: policy and engine do not score the same steps", ALIGN


def _difference(first: Tensor, second: Tensor, valid: Tensor) -> float:
    """Return the mean absolute difference of two tensors (rows, steps) over the steps in the mask `valid`."""
    valid = valid.cpu()
    return float((first.cpu().double() - second.cpu().double())[valid].abs().mean())
