"""Estimated pass rates of prompts, from a prior and the rewards of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.core.types import Prompt

EVEN = 0.5  # prior pass rate without a column


class PriorValue:
    """Running pass rates of prompts, shrunk to a prior with the weight of `prior_count` rollouts.

    The prior is a data column, instead of V_0's value model (arXiv 2602.03584). Predictions of a model, such
    as a critic, replace the estimate without shrinkage.
    """

    def __init__(self, column: str = "", prior_count: float = 2.0) -> None:
        self.column, self.prior_count = column, prior_count
        self.predicted: dict[str, float] = {}  # predictions of a critic for the last draw
        self.sums: dict[str, tuple[float, float, float]] = {}  # count, sum, sum of squares by uid

    def prior(self, prompt: Prompt) -> float:
        """Return the prior pass rate of a prompt; raises `ConfigError` unless its column is in [0, 1]."""
        if prompt.uid in self.predicted:
            return self.predicted[prompt.uid]
        if not self.column:
            return EVEN
        value = prompt.columns.get(self.column)
        match value:
            case int() | float() if 0.0 <= value <= 1.0 and type(value) is not bool:
                return float(value)
        raise ConfigError(
            f"prompt '{prompt.uid}' needs a number from 0 to 1 in the column '{self.column}' "
            f"(`prior_column`), which is its predicted pass rate; it has {value!r}"
        )

    def add(self, uid: str, rewards: list[float]) -> None:
        """Add rewards in [0, 1] to the statistics of a prompt."""
        count, total, squares = self.sums.get(uid, (0.0, 0.0, 0.0))
        more = (count + len(rewards), total + sum(rewards), squares + sum(reward**2 for reward in rewards))
        self.sums[uid] = more

    def rate(self, prompt: Prompt) -> float:
        """Estimate the pass rate of a prompt; by default the posterior mean with the prior Beta(1, 1)."""
        if prompt.uid in self.predicted:
            return self.predicted[prompt.uid]
        count, total, _ = self.sums.get(prompt.uid, (0.0, 0.0, 0.0))
        prior = self.prior(prompt)
        weight = count + self.prior_count
        return (total + self.prior_count * prior) / weight if weight else prior

    def bias(self, prompt: Prompt) -> float:
        """Estimate the squared error of the prior, in units of a reward from -1 to 1 (V_0.5's Delta^2).

        It is max(0, (mean - prior)^2 - 1 / n) over the n rollouts so far, and 0 without rollouts.
        """
        count, total, _ = self.sums.get(prompt.uid, (0.0, 0.0, 0.0))
        if not count:
            return 0.0
        # A reward r in [0, 1] becomes 2 r - 1 in [-1, 1], so distances double.
        return max(0.0, (2 * (total / count - self.prior(prompt))) ** 2 - 1 / count)

    def spread(self, prompt: Prompt) -> float:
        """Compute the sample standard deviation of a prompt's rewards; 0 for fewer than two."""
        count, total, squares = self.sums.get(prompt.uid, (0.0, 0.0, 0.0))
        return max(0.0, (squares - total**2 / count) / (count - 1)) ** 0.5 if count > 1 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the count, sum and sum of squares of the rewards of every prompt, by uid."""
        return {uid: list(sums) for uid, sums in self.sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sums = {uid: (count, total, squares) for uid, (count, total, squares) in state.items()}
