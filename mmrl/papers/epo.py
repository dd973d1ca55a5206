"""EPO (arXiv 2509.22576): a penalty keeps the entropy near its running mean; its weight decays.

Title: EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning
Formula: coef(n) (max(low m - H, 0) + max(H - high m, 0)), with the past mean m of the entropy H.
Our reading: the distance to the corridor, since the released constant has no gradient; n counts
collections.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveInt, TakenFloat
from mmrl.config.registry import penalty, schedule
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Clock


@penalty(extra={"entropy"})
def entropy_corridor(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.001,
    mean: NonNegativeFloat = 0.0,
    low: Annotated[NonNegativeFloat, AtMost("high")] = 0.5,
    high: NonNegativeFloat = 1.5,
    form: Literal["hinge", "indicator"] = "hinge",
    delta: NonNegativeFloat = 0.1,
) -> Tensor:
    """Hold every step's entropy between two multiples of its past mean (EPO, arXiv 2509.22576).

    Our reading: `hinge`, the distance to the corridor. The released `indicator` is a constant outside of
    it: it changes the loss and has no gradient.

    Args:
        coef: Weight of the penalty; the paper's falls over training (`epo_decay`).
        mean: Past mean entropy, in nats: `{name: running_mean, metrics: [entropy]}`. 0 is no past, and costs
            nothing.
        low: Lower end of the corridor, as a multiple of the mean.
        high: Upper end of the corridor, as a multiple of the mean.
        form: `hinge` or `indicator`.
        delta: Cost of a step outside of the corridor; read by `indicator` alone.
    """
    entropy = new.extra["entropy"]
    if mean <= 0:
        return torch.zeros_like(entropy)
    outside = (low * mean - entropy).clamp(min=0) + (entropy - high * mean).clamp(min=0)
    if form == "indicator":  # the bounds themselves are outside, as in the released code
        outside = delta * ((entropy <= low * mean) | (entropy >= high * mean)).to(entropy.dtype)
    return coef * outside


@schedule
def epo_decay(clock: Clock, *, value: TakenFloat, steps: PositiveInt | None = None) -> float:
    """EPO's weight of the entropy corridor: slow decay, then fast (arXiv 2509.22576).

    With h half of the steps: 1 - 0.2 (1 - exp(-2 n / h)) up to h, and 0.8 exp(-3 (n - h) / (steps - h)) after
    it, as in the released code. Our reading: n counts collections.

    Args:
        value: First value.
        steps: Length in steps of the clock; null: the whole run, of `max_steps`.
    """
    whole = max(steps or clock.max_steps, 1)
    half, step = whole // 2, min(clock.step, whole)
    if step <= half:
        return value * (1 - 0.2 * (1 - math.exp(-2 * step / max(half, 1))))
    return value * 0.8 * math.exp(-3 * (step - half) / (whole - half))
