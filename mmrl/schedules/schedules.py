"""Schedules over steps."""

from __future__ import annotations

import math

from mmrl.registry import schedule
from mmrl.types import Clock


def _warm(value: float, step: int, warmup_steps: int) -> float:
    return value * min(1.0, (step + 1) / warmup_steps) if warmup_steps else value


@schedule
def constant(clock: Clock, *, value: float, warmup_steps: int = 0) -> float:
    """Stay at `value`, after rising to it from 0 over `warmup_steps`."""
    return _warm(value, clock.step, warmup_steps)


@schedule
def linear(clock: Clock, *, start: float, end: float, steps: int, warmup_steps: int = 0) -> float:
    """Go from `start` to `end` in a straight line over `steps`, and stay there."""
    share = min(1.0, clock.step / max(steps, 1))
    return _warm(start + (end - start) * share, clock.step, warmup_steps)


@schedule
def cosine(clock: Clock, *, start: float, end: float, steps: int, warmup_steps: int = 0) -> float:
    """Go from `start` to `end` along half a cosine over `steps`, and stay there."""
    share = min(1.0, clock.step / max(steps, 1))
    return _warm(end + (start - end) * 0.5 * (1 + math.cos(math.pi * share)), clock.step, warmup_steps)
