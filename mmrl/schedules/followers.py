"""Schedules that follow reported metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.ranges import TakenFloat
from mmrl.config.registry import schedule
from mmrl.core.types import Clock

REWARDS = ("rewards/chosen", "rewards/rejected")


@schedule
def last_metric(clock: Clock, *, metrics: tuple[str, ...] = REWARDS, start: TakenFloat = 0.0) -> float:
    """Mean of `metrics` at the previous step; `start` before there are any."""
    return _mean(clock, metrics, start)


@schedule
class RunningMean:
    """Mean of `metrics` over all steps so far; `start` before there are any.

    With the defaults it is BCO's shift of the rewards (arXiv 2404.04656).
    """

    def __init__(self, *, metrics: tuple[str, ...] = REWARDS, start: TakenFloat = 0.0) -> None:
        self.metrics, self.start = metrics, start
        self.mean, self.count = 0.0, 0

    def __call__(self, clock: Clock) -> float:
        """Include the metrics of the previous step, and return the mean."""
        if all(name in clock.metrics for name in self.metrics):
            self.count += 1
            self.mean += (_mean(clock, self.metrics, self.start) - self.mean) / self.count
        return self.mean if self.count else self.start

    def state_dict(self) -> dict[str, Any]:
        """Return the mean and the number of steps in it."""
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the mean and the number of steps in it."""
        self.mean, self.count = state["mean"], state["count"]


def _mean(clock: Clock, names: Sequence[str], start: float) -> float:
    if not all(name in clock.metrics for name in names):
        return start
    return sum(clock.metrics[name] for name in names) / len(names)
