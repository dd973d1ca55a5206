"""Schedules over steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Literal

from mmrl.config.ranges import AtMost, NonNegativeFloat, NonNegativeInt, PositiveInt, TakenFloat, TakenInt
from mmrl.config.registry import schedule
from mmrl.core.types import Clock


def _warm(value: float, step: int, warmup_steps: int) -> float:
    return value * min(1.0, (step + 1) / warmup_steps) if warmup_steps else value


@schedule
def constant(clock: Clock, *, value: TakenFloat, warmup_steps: NonNegativeInt = 0) -> float:
    """Stay at `value`, after rising to it from 0 over `warmup_steps`."""
    return _warm(value, clock.step, warmup_steps)


@schedule
def linear(
    clock: Clock, *, start: TakenFloat, end: TakenFloat, steps: PositiveInt, warmup_steps: NonNegativeInt = 0
) -> float:
    """Go from `start` to `end` in a straight line over `steps`, and stay there."""
    share = min(1.0, clock.step / max(steps, 1))
    return _warm(start + (end - start) * share, clock.step, warmup_steps)


@schedule
def cosine(
    clock: Clock, *, start: TakenFloat, end: TakenFloat, steps: PositiveInt, warmup_steps: NonNegativeInt = 0
) -> float:
    """Go from `start` to `end` along half a cosine over `steps`, and stay there."""
    share = min(1.0, clock.step / max(steps, 1))
    return _warm(end + (start - end) * 0.5 * (1 + math.cos(math.pi * share)), clock.step, warmup_steps)


@schedule
def ramp(clock: Clock, *, slope: NonNegativeFloat, limit: TakenFloat, delay: NonNegativeInt = 0) -> float:
    """Rise from 0 by `slope` a step once `delay` steps are over, up to `limit`: the decay of DiffusionNFT's
    moving average (arXiv 2509.16117)."""
    return min(limit, slope * max(0, clock.step - delay))


@schedule
def ema_warmup(clock: Clock, *, limit: TakenFloat = 0.9, offset: PositiveInt = 10) -> float:
    """Rise as (1 + n) / (offset + n), n the step, up to `limit`: the decay of Flow-GRPO's moving average
    (arXiv 2505.05470). Our reading: n counts collections, in the code it counts optimizer steps."""
    return min(limit, (1 + clock.step) / (offset + clock.step))


@schedule
def sliding_window(
    clock: Clock,
    *,
    start: Annotated[TakenInt, AtMost("stop")] = 0,
    step: PositiveInt = 1,
    every: PositiveInt = 25,
    stop: TakenInt,
    roll_back: bool = True,
    decay: Literal["none", "linear", "exponential"] = "none",
    least: PositiveInt = 1,
    rate: NonNegativeFloat = 0.1,
    after: NonNegativeInt = 13,
) -> float:
    """Climb from `start` by `step` every so many steps, never above `stop`; then begin anew, or with
    `roll_back: false` stay (MixGRPO's sliding window, arXiv 2507.21802).

    With `decay` higher stairs are left sooner. `linear` goes from `every` at 0 to `least` at `stop`, rounded
    down (the code's strategy `decay`); `exponential` is every exp(-rate (stair - after)) above `after`,
    rounded up (`exp_decay`).
    """
    if stop < start or min(step, every, least) < 1:
        raise ValueError(
            f"`sliding_window` climbs: `stop` {stop} must not be below `start` {start}, and `step` {step}, "
            f"`every` {every} and `least` {least} must be at least 1"
        )

    def length(stair: int) -> int:
        """Count the steps on a stair."""
        if decay == "linear":
            share = stair / max(stop, 1)
            return max(least, int(every * (1 - share) + least * share))
        if decay == "exponential":
            return math.ceil(every * math.exp(-rate * max(0, stair - after)))
        return every

    stairs = range(start, stop + 1, step)
    ends = list(accumulate(map(length, stairs)))
    at = clock.step % ends[-1] if roll_back else min(clock.step, ends[-1] - 1)
    return stairs[bisect_right(ends, at)]
