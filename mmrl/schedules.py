"""Schedules of option values over training steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from mmrl.config.ranges import AtMost, NonNegativeFloat, NonNegativeInt, PositiveInt, TakenFloat, TakenInt
from mmrl.config.registry import schedule
from mmrl.core.types import Clock


def _warm(value: float, clock: Clock, warmup_steps: float) -> float:
    steps = math.ceil(warmup_steps * clock.max_steps) if warmup_steps < 1 else warmup_steps
    # Count from step + 1: step 0 is above 0, and step `steps` - 1 has the full value.
    return value * min(1.0, (clock.step + 1) / steps) if steps else value


@schedule
def constant(clock: Clock, *, value: TakenFloat, warmup_steps: NonNegativeFloat = 0) -> float:
    """Return `value`, after a linear warmup from 0 over `warmup_steps` (below 1: fraction of the run)."""
    return _warm(value, clock, warmup_steps)


@schedule
def linear(
    clock: Clock,
    *,
    start: TakenFloat,
    end: TakenFloat,
    steps: PositiveInt | None = None,
    warmup_steps: NonNegativeFloat = 0,
) -> float:
    """Change linearly from `start` to `end` over `steps`, then stay constant.

    Args:
        start: First value.
        end: Last value.
        steps: Number of training steps of the change; null: the whole run (`max_steps`).
        warmup_steps: Steps over which the value is scaled linearly up from 0; below 1: a fraction of the run.
    """
    share = min(1.0, clock.step / max(steps or clock.max_steps, 1))
    return _warm(start + (end - start) * share, clock, warmup_steps)


@schedule
def cosine(
    clock: Clock,
    *,
    start: TakenFloat,
    end: TakenFloat,
    steps: PositiveInt | None = None,
    warmup_steps: NonNegativeFloat = 0,
) -> float:
    """Change along half a cosine from `start` to `end` over `steps`, then stay constant.

    Args:
        start: First value.
        end: Last value.
        steps: Number of training steps of the change; null: the whole run (`max_steps`).
        warmup_steps: Steps over which the value is scaled linearly up from 0; below 1: a fraction of the run.
    """
    share = min(1.0, clock.step / max(steps or clock.max_steps, 1))
    # (1 + cos(pi x)) / 2 falls from 1 at x = 0 to 0 at x = 1.
    return _warm(end + (start - end) * 0.5 * (1 + math.cos(math.pi * share)), clock, warmup_steps)


@schedule
def periodic(
    clock: Clock,
    *,
    low: Annotated[TakenFloat, AtMost("high")],
    high: TakenFloat,
    period: PositiveInt = 640,
    form: Literal["cosine", "stairs", "stair_cosine"] = "cosine",
) -> float:
    """Oscillate between `high` and `low` with a `period` (SIRI, arXiv 2509.25176).

    Used for `max_completion_length`, it compresses answers and lets them grow again.

    Args:
        low: Smallest value, at half of a period.
        high: Largest value, at the start of a period.
        period: Steps of a period; the paper's is 640.
        form: `cosine`: a cosine. `stairs`: high in the first half and low in the second (our reading).
            `stair_cosine`: a cosine that stays for a quarter of the period at each end.
    """
    share = clock.step % period / period
    if form == "stairs":
        return high if share < 0.5 else low
    if form == "stair_cosine":  # 1/8 at the top, 1/4 down, 1/4 at the bottom, 1/4 up, 1/8 at the top
        share = min(max(share - 1 / 8, 0.0), 0.25) * 2 + min(max(share - 5 / 8, 0.0), 0.25) * 2
    return (high + low) / 2 + (high - low) / 2 * math.cos(2 * math.pi * share)


@schedule
def ramp(clock: Clock, *, slope: NonNegativeFloat, limit: TakenFloat, delay: NonNegativeInt = 0) -> float:
    """Rise linearly from 0, like the moving average's decay in DiffusionNFT (arXiv 2509.16117).

    Args:
        slope: Increase per step.
        limit: Largest value.
        delay: Steps at 0 before the ramp begins.
    """
    return min(limit, slope * max(0, clock.step - delay))


@schedule
def ema_warmup(clock: Clock, *, limit: TakenFloat = 0.9, offset: PositiveInt = 10) -> float:
    """Rise as (1 + n) / (offset + n) at step n, up to `limit` (Flow-GRPO, arXiv 2505.05470).

    Flow-GRPO uses this value as the decay of a moving average of the weights. Our reading: n counts training
    steps; in the authors' code it counts optimizer steps.
    """
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
    """Return the first trained denoising step of MixGRPO's sliding window (arXiv 2507.21802).

    Args:
        start: First position of the window.
        step: Distance between positions.
        every: Training steps at a position.
        stop: Last possible position.
        roll_back: Begin again after the last position; otherwise stay there.
        decay: Change of `every` with the position. `none`: `every` steps at all positions. `linear`: from
            `every` at position 0 to `least` at `stop`, rounded down (the code's strategy `decay`).
            `exponential`: every * exp(-rate * (position - after)) beyond `after`, rounded up (`exp_decay`).
        least: Training steps at `stop` with `decay: linear`.
        rate: Rate of `decay: exponential`, per position.
        after: Position after which `decay: exponential` begins.
    """

    if stop < start:
        raise ValueError(f"`sliding_window` climbs: `stop` {stop} must not be below `start` {start}")

    def length(stair: int) -> int:
        """Return the number of training steps for which the window stays at position `stair`."""
        if decay == "linear":
            share = stair / max(stop, 1)
            return max(least, int(every * (1 - share) + least * share))
        if decay == "exponential":
            return math.ceil(every * math.exp(-rate * max(0, stair - after)))
        return every

    stairs = range(start, stop + 1, step)
    ends = list(accumulate(map(length, stairs)))  # number of training steps after which each position is left
    at = clock.step % ends[-1] if roll_back else min(clock.step, ends[-1] - 1)
    return stairs[bisect_right(ends, at)]  # the first position that ends after `at`


# ---- schedules that follow reported metrics

REWARDS = ("rewards/chosen", "rewards/rejected")


@schedule
def last_metric(clock: Clock, *, metrics: tuple[str, ...] = REWARDS, start: TakenFloat = 0.0) -> float:
    """Return the mean of `metrics` at the previous step, or `start` if they are not reported yet."""
    return _mean(clock, metrics, start)


@schedule
class RunningMean:
    """Mean of `metrics` over all steps so far, or `start` if they are not reported yet.

    With the defaults it is BCO's shift of the rewards (arXiv 2404.04656).
    """

    def __init__(self, *, metrics: tuple[str, ...] = REWARDS, start: TakenFloat = 0.0) -> None:
        self.names, self.start = metrics, start
        self.mean, self.count = 0.0, 0

    def __call__(self, clock: Clock) -> float:
        """Add the metrics of the previous step to the running mean, and return the mean."""
        if all(name in clock.metrics for name in self.names):
            self.count += 1
            # m + (x - m) / n = ((n - 1) m + x) / n
            self.mean += (_mean(clock, self.names, self.start) - self.mean) / self.count
        return self.mean if self.count else self.start

    def state_dict(self) -> dict[str, Any]:
        """Return the running mean and the number of steps that it averages."""
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running mean and the number of steps that it averages."""
        self.mean, self.count = state["mean"], state["count"]


@schedule
class Towards:
    """A value that changes at every step until the mean of reported metrics reaches a target.

    With a positive rate the value rises while the metrics are above the target, like the multiplier of a
    constraint (dual ascent). With a negative rate it falls, like an entropy coefficient that maintains an
    entropy (TRL's `use_adaptive_entropy`).

    Args:
        metrics: Names of metrics; their mean at the previous step is compared with the target.
        target: Mean of the metrics at which the value stays constant.
        rate: Change per step and unit of distance to the target; with `form: sign`, the change per step.
        start: First value.
        low: Smallest value.
        high: Largest value; null: none.
        form: `proportional`: change in proportion to the distance. `sign`: use only its sign.
    """

    def __init__(
        self,
        *,
        target: float,
        metrics: tuple[str, ...] = REWARDS,
        rate: float = 0.1,
        start: TakenFloat = 0.0,
        low: TakenFloat = 0.0,
        high: TakenFloat | None = None,
        form: Literal["proportional", "sign"] = "proportional",
    ) -> None:
        self.names, self.target, self.rate, self.form = metrics, target, rate, form
        self.low, self.high = low, high
        self.value = start

    def __call__(self, clock: Clock) -> float:
        """Update the scheduled value with the metrics of the previous step, and return the value."""
        if all(name in clock.metrics for name in self.names):
            away = _mean(clock, self.names, 0.0) - self.target
            if self.form == "sign":
                away = math.copysign(1.0, away) if away else 0.0
            moved = max(self.low, self.value + self.rate * away)
            self.value = moved if self.high is None else min(self.high, moved)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the current value of the schedule."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the value of the schedule."""
        self.value = state["value"]


def _mean(clock: Clock, names: Sequence[str], start: float) -> float:
    if not all(name in clock.metrics for name in names):
        return start
    return sum(clock.metrics[name] for name in names) / len(names)
