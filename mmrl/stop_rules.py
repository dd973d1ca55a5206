"""Rules that end a run before `max_steps`, based on a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmrl.config.loading import ConfigError, nearest
from mmrl.config.ranges import NonNegativeFloat, PositiveInt
from mmrl.config.registry import stop_rule

CLOCKS = ("time/", "step_time", "energy/")  # prefixes of metrics that no rule may use: not reproducible


class StopRule:
    """Rule that ends a run once a condition on a metric's mean holds `patience` times in a row.

    The mean is over the latest `window` values. A metric has one value per step, or one per evaluation if its
    name begins with `eval_`. Non-finite values are skipped.
    """

    def __init__(self, metric: str, window: int, patience: int) -> None:
        if metric.startswith(CLOCKS):
            raise ValueError(
                f"'{metric}' is measured by a clock, so no two runs would end alike; name another"
            )
        self.metric, self.window, self.patience = metric, window, patience
        self.held_out = metric.startswith("eval_")
        self.latest: list[float] = []
        self.streak = 0  # number of consecutive measurements at which the condition held
        self.ended = False

    def holds(self, mean: float) -> bool:
        """Whether the stop condition holds for this mean over the latest window; called once per value."""
        raise NotImplementedError

    def on_event(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Read the metric of a step; raise `ConfigError` if the run has no such metric."""
        if event != "step_end":
            return
        measured = [name for name in metrics if name.startswith("eval_") or not self.held_out]
        if self.metric not in metrics and measured:  # `eval_` metrics are missing at most steps
            hint = nearest(self.metric, measured) or f"there are {', '.join(sorted(measured))}"
            raise ConfigError(f"until: the run has no metric '{self.metric}'; {hint}")
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return
        self.latest = [*self.latest, value][-self.window :]
        if len(self.latest) == self.window:
            self.streak = self.streak + 1 if self.holds(sum(self.latest) / self.window) else 0
            self.ended = self.ended or self.streak >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the latest values, how often the condition held in a row, and whether the run has ended."""
        return {"latest": list(self.latest), "streak": self.streak, "ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.latest, self.streak, self.ended = list(state["latest"]), state["streak"], state["ended"]


@stop_rule
class Threshold(StopRule):
    """End the run when a metric is above or below a number.

    Args:
        of: A metric, by its name in metrics.jsonl, such as `reward` or `eval_recall`.
        above: The run ends when the mean of the window is above this; give this or `below`.
        below: The run ends when the mean of the window is below this.
        window: Number of measurements in the mean; the rule waits until there are this many.
        patience: Number of consecutive measurements at which the condition must hold.
    """

    def __init__(
        self,
        *,
        of: str,
        above: float | None = None,
        below: float | None = None,
        window: PositiveInt = 1,
        patience: PositiveInt = 1,
    ) -> None:
        if (above is None) == (below is None):
            given = "neither" if above is None else "both"
            raise ValueError(f"threshold wants `above` or `below`, and {given} of them is given")
        super().__init__(of, window, patience)
        self.above, self.below = above, below

    def holds(self, mean: float) -> bool:
        """Return whether the metric's mean is above `above`, or below `below`."""
        return mean > self.above if self.above is not None else self.below is not None and mean < self.below


@stop_rule
class EarlyStopping(StopRule):
    """End the run when a metric has not improved for `patience` measurements (as transformers' callback).

    Args:
        of: A metric, by its name in metrics.jsonl, such as `eval_mean_iou`.
        greater_is_better: Whether larger values of the metric are better; false e.g. for an uncertainty.
        threshold: A mean is an improvement if it is better than the best so far by more than this.
        window: Number of measurements in the mean; the first mean is the first best.
        patience: Number of consecutive measurements without an improvement.
    """

    def __init__(
        self,
        *,
        of: str,
        greater_is_better: bool = True,
        threshold: NonNegativeFloat = 0.0,
        window: PositiveInt = 1,
        patience: PositiveInt = 3,
    ) -> None:
        super().__init__(of, window, patience)
        self.sign = 1.0 if greater_is_better else -1.0
        self.threshold = threshold
        self.best: float | None = None

    def holds(self, mean: float) -> bool:
        """Return True if the metric's mean is no improvement; otherwise record it as the best mean."""
        improved = self.best is None or self.sign * (mean - self.best) > self.threshold
        self.best = mean if improved else self.best
        return not improved

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class and the best mean so far."""
        return {**super().state_dict(), "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self.best = state["best"]
