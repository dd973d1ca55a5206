"""Whether the policy says of its own rollouts what the engine noted while it made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import check, find
from mmrl.diagnostics.context import Examined, Finding, cheapened, spelled
from mmrl.runtime.modules import dropping, evaluating


@check(on="start")
def initial_ratio(
    examined: Examined, *, tolerance: NonNegativeFloat = 1e-3, max_kl: NonNegativeFloat = 0.1
) -> Iterator[Finding]:
    """Replay rollouts at the batch size of learning: before the first update the ratio of policy to engine is
    1.

    Where it is not (mean absolute difference of log-probabilities above `tolerance`), the policy is asked
    again: twice, in evaluation mode, one row at a time, in float32, one step to the side; the first that
    mends it names the reason. Where the engine is cheaper on purpose, the gap is told, and is wrong only
    beyond a KL of `max_kl` nats a step.
    """
    noted = examined.batch.notes.get("logp")
    if noted is None:
        return
    known = (examined.batch.mask > 0) & ~noted.isnan()
    if not known.any():
        return
    said = examined.replay()
    gap = _gap(said, noted, known)
    unsteady = _gap(said, examined.replay(), known)
    cheap = cheapened(examined.config)
    if cheap and unsteady <= tolerance:
        yield _told(said, noted, known, cheap, max_kl)
    elif max(gap, unsteady) > tolerance:
        what = (
            f"the ratio is not 1 before the first update: log-probabilities of engine and policy differ by "
            f"{gap:.3g} on average"
        )
        yield Finding(*_reason(examined, noted, known, what, unsteady > 1e-9, tolerance))


def _told(said: Tensor, noted: Tensor, known: Tensor, cheap: Sequence[str], max_kl: float) -> Finding:
    """Tell how far an engine is that is cheaper than the policy."""
    gap = torch.where(known.cpu(), said - noted.cpu().double().nan_to_num(), 0.0).clamp(-20, 20)
    kl = float((gap.exp() - gap - 1).sum() / known.sum())
    weight = gap.sum(1).clamp(-20, 20).exp()
    share = float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))
    what = (
        f"rollouts are cheaper than the policy on purpose ({', '.join(cheap)}): log-probabilities differ by "
        f"{_gap(said, noted, known):.3g} on average, KL {kl:.3g} nats a step, and weighed answers are worth "
        f"{share:.0%} of as many exact ones"
    )
    if kl > max_kl:
        return Finding(
            what, "that is far: give the engine more bits or drop less, or leave both out to compare"
        )
    return Finding(what, "`compression.speedup_probe` around the engine tells the seconds saved", grave=False)


@check(on="start")
def importance_correction(examined: Examined) -> Iterator[Finding]:
    """See whether rollouts of a cheaper model than the one that learns are weighed by how likely the policy
    finds them."""
    cheap, objective = cheapened(examined.config), examined.config.objective
    weighs = "step_weight" in find("objective", objective.name).options
    if cheap and weighs and "engine" not in examined.needs.others:
        yield Finding(
            f"rollouts come from a cheaper model than the one that learns ({', '.join(cheap)}), and nothing "
            "corrects for it",
            "add `truncated_importance` to objective.focus, as variants/importance_*.yaml do",
        )


def _reason(
    examined: Examined, noted: Tensor, known: Tensor, what: str, unsteady: bool, tolerance: float
) -> tuple[str, str]:
    policy = examined.policy
    with evaluating(policy.module):
        calm = examined.replay()
    if unsteady or _gap(calm, noted, known) <= tolerance:
        parts = dropping(policy.module)
        named = f"dropout is on in {spelled(parts)}" if parts else "something in the policy draws numbers"
        return f"{what}, because {named}", "put the model into evaluation mode, or set its dropout to 0"
    if _gap(examined.replay(one_by_one=True), noted, known) <= tolerance:
        return (
            f"{what}, but not when rows are asked one at a time: it depends on the batch size",
            "look at padding, masks and positions; until then lower learn.micro_batch_steps",
        )
    exact = examined.again(dtype="float32")
    if exact is not None and _replayed_gap(exact) <= tolerance:
        dtype = examined.config.policy.options.get("dtype", "its default dtype")
        return (
            f"{what}, but not in float32: it is the precision of {dtype}",
            "set policy.dtype=float32, or bear it with objective.focus=[truncated_importance] and a clip "
            "range well above it",
        )
    steps = known.shape[1]
    for by, side in ((1, "earlier"), (-1, "later")):
        low, high = max(0, by), min(steps, steps + by)
        both = known[:, low:high] & known[:, low - by : high - by]
        if both.any() and _gap(calm[:, low:high], noted[:, low - by : high - by], both) <= tolerance:
            return f"{what}: the policy says of a step what belongs one step {side}", _ALIGN
    tried = "in evaluation mode, row by row" + (" and in float32" if exact is not None else "")
    return f"{what}, also {tried}: the two do not speak of the same steps", _ALIGN


_ALIGN = (
    "compare labels (shifted by one?), temperature, guidance and schedule of engine and policy; until then "
    "nothing that is learned means anything"
)


def _replayed_gap(examined: Examined) -> float:
    noted = examined.batch.notes["logp"]
    return _gap(examined.replay(), noted, (examined.batch.mask > 0) & ~noted.isnan())


def _gap(one: Tensor, other: Tensor, known: Tensor) -> float:
    known = known.cpu()
    return float((one.cpu().double() - other.cpu().double())[known].abs().mean())
