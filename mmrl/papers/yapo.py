"""The objective of steering vectors, which learns from adding and from subtracting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mmrl.config.registry import Needs, objective
from mmrl.core.step_table import Batch, StepOutput


@objective
@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """Learn from pairs with the steering vector added, and from swapped pairs with it subtracted.

    The vector then points from the rejected to the chosen answers (BiPO, arXiv 2406.00045; YaPO, arXiv
    2601.08441). The loss is the mean of both directions, where the papers draw one for every batch: our
    reading, with the same expectation. Metrics of the second direction begin with `reversed/`.

    Args:
        objective: A comparison of pairs, such as `{name: comparison, implicit_reward: log_ratio, compare:
            sigmoid}`; what it compares with does not change its sign.
    """

    objective: Callable

    @property
    def needs(self) -> Needs:
        """What the comparison needs, and the log-probabilities with the vector subtracted."""
        return self.objective.needs | Needs(extra=frozenset({"reversed_logp"}))

    def weigh(self, batch: Batch) -> Tensor:
        """Weigh every step as the comparison does."""
        return self.objective.weigh(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss of a micro-batch and its metrics, as shares of the update."""
        loss, metrics = self.objective(new, batch)
        back = StepOutput(new.extra["reversed_logp"], {})
        other, more = self.objective(back, batch.replace(advantage=-batch.advantage))
        return (loss + other) / 2, {
            **metrics,
            **{f"reversed/{metric}": value for metric, value in more.items()},
        }
