"""Detection of runs that do not learn: steps without an update, checkpoints with equal weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FIRST = 3  # warn if this many steps at the start of a run have no update
LASTING = 12  # number of steps without an update that stops a run at its start; later, warn


class NoLearning(RuntimeError):
    """Raised if the first steps of a run changed no weight."""


@dataclass
class LearningSignal:
    """Counter of a run's updates; warns or stops the run after many steps without an update.

    An update is an optimizer step with a gradient and a learning rate above 0.

    Args:
        stops: Raise `NoLearning` if the first `LASTING` steps of the run have no update; otherwise warn.
        warn: Shows a warning.
    """

    stops: bool
    warn: Callable[[str], None]
    updates: int = 0
    idle: int = 0  # number of steps since the last update
    weights: str = ""  # hash of the trained weights in the last checkpoint

    def see(self, updates: int, metrics: Mapping[str, float], *, scheduled: bool = False) -> None:
        """Record how many updates a step had; warn or raise after too many steps without any.

        `metrics` explain the cause. A `scheduled` learning rate that is currently 0 does not end the run.
        """
        self.updates, self.idle = self.updates + updates, 0 if updates else self.idle + 1
        if self.updates and self.idle == LASTING:
            self.warn(f"no weight moved in the last {LASTING} steps: {cause(metrics)}")
        if self.updates or self.idle not in (FIRST, LASTING):
            return
        text = f"nothing was learned in the first {self.idle} steps: {cause(metrics)}"
        if self.stops and self.idle == LASTING and not (scheduled and metrics["learning_rate"] == 0):
            raise NoLearning(f"{text}. `learn.on_no_learning: warn` goes on all the same")
        self.warn(text)

    def compare(self, weights: str, step: int) -> None:
        """Warn if a checkpoint has the same weight hash as the previous checkpoint."""
        if weights and weights == self.weights:
            self.warn(
                f"checkpoint-{step} holds the same weights as the one before; look at learn.learning_rate, "
                "at the gradient norm, and at updates too small for the weights' precision"
            )
        self.weights = weights

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, the number of idle steps, and the weight hash."""
        return {"updates": self.updates, "idle": self.idle, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.updates, self.idle, self.weights = state["updates"], state["idle"], state["weights"]


def cause(metrics: Mapping[str, float]) -> str:
    """Explain from the metrics of a step why it changed no weight, and give advice."""
    failed = [name for name, rate in metrics.items() if name.endswith("/error_rate") and rate > 0]
    if failed and math.isnan(metrics.get("reward", 0.0)):  # no group is whole
        names = ", ".join(f"'{name.split('/', 1)[1].rpartition('/')[0]}'" for name in failed)
        return f"every group was dropped, since {names} failed for one of its answers; mend the reward"
    alike = metrics.get("frac_reward_zero_std") == 1 or metrics.get("reward_std") == 0
    if metrics.get("frac_groups_kept") == 0 or alike:
        dropped = "the group filter kept no group, since" if metrics.get("frac_groups_kept") == 0 else ""
        reward = metrics.get("reward", 0.0)
        return (
            f"{dropped} all answers of every prompt earned the same (mean reward {reward:.3g}); "
            "start from demonstrations (docs/howto/demonstrations.md), sample at a higher temperature, more "
            "num_generations, take easier prompts, or a reward that tells answers apart"
        ).strip()
    if metrics.get("learning_rate") == 0:
        return "learn.learning_rate is 0"
    if metrics.get("skipped_updates"):
        return "updates were skipped, since their gradients were not finite; see the folder `faults`"
    return (
        "the loss has no gradient; every advantage is 0 or no trained weight is in the graph: look at the "
        "advantages in `completions/`, and run `mmrl doctor`"
    )
