"""A sampler that gives more rollouts to the prompts that gain most from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import AtMost, NonNegativeFloat, PositiveInt, Range
from mmrl.config.registry import sampler
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Prompt, Rollouts
from mmrl.samplers.candidates import reward_of
from mmrl.samplers.prior_value import PriorValue


@sampler
class Allocate:
    """Divide the rollouts of a step unevenly over its prompts, according to estimated pass rates.

    The wrapped sampler chooses the prompts. Every prompt gets `at_least` rollouts; each further rollout goes
    to the prompt with the largest gain, until the budget of the step is spent:

    - `v0`: increase of the utility n (1 - p) (1 - (1 - p)^(n - 1)) of n rollouts at pass rate p (V_0,
      arXiv 2602.03584).
    - `v05`: decrease of the squared error of a baseline shrunk to `prior_column` (V_0.5, arXiv 2603.10848).
      Rollouts with a gain of at most `rollout_cost` are skipped, so a step may stay below its budget.
    - `xrpo`: decrease of the half-width of the 95% interval of the mean reward, plus `exploration`
      sqrt(ln(1 + rollouts) / n) (XRPO, arXiv 2510.06672).

    Our readings: the rules use results of earlier steps, not of the current one. Pass rates are means over
    all rollouts of a prompt, shrunk to the prior, which is Beta(1, 1) without a column. Predictions of a
    value model are not shrunk, as in V_0. We train the value model during the run, V_0 before it.

    Args:
        rule: Definition of the gain of a further rollout, see above.
        of: Name of the reward, clamped to [0, 1]; "": the weighted sum of all rewards.
        prior_column: Column with a predicted pass rate per prompt, such as V_0's; "": 1/2 for all.
        value_model: Critic in `references` with `probability: true` that predicts pass rates instead of a
            column; "": none.
        prior_count: Weight of the prior, in rollouts.
        at_least: Minimum rollouts per prompt (V_0: 2, V_0.5: 4).
        at_most: Maximum rollouts per prompt (V_0: 128, V_0.5: 16).
        rollout_cost: Smallest useful gain of `v05`, in squared units of a reward from -1 to 1.
        exploration: Factor of the bonus of `xrpo`.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        rule: Literal["v0", "v05", "xrpo"] = "v0",
        of: str = "",
        prior_column: str = "",
        value_model: str = "",
        prior_count: NonNegativeFloat = 2.0,
        at_least: Annotated[int, Range(2), AtMost("at_most")] = 2,
        at_most: PositiveInt = 128,
        rollout_cost: NonNegativeFloat = 0.0039,
        exploration: NonNegativeFloat = 0.5,
    ) -> None:
        if value_model and prior_column:
            raise ConfigError(
                f"sampler 'allocate': both the column '{prior_column}' and the second model '{value_model}' "
                "predict pass rates; leave `prior_column` or `value_model` out"
            )
        self.sampler, self.of, self.gain = sampler, of, GAINS[rule]
        self.value_model = value_model
        self.values: Callable[[Sequence[Prompt]], list[float]] | None = None
        self.floor = rollout_cost if rule == "v05" else -math.inf  # no rollout for smaller gains
        self.exploration, self.at_least, self.at_most = exploration, at_least, at_most
        self.value = PriorValue(prior_column, prior_count)
        self.given: dict[str, int] = {}  # number of rollouts by uid in the last step

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw the prompts of the wrapped sampler, each repeated by its number of rollouts."""
        budget = self.sampler.draw(num_prompts, num_generations)
        prompts = list({prompt.uid: prompt for prompt in budget}.values())
        if len(budget) < self.at_least * len(prompts):
            raise ConfigError(
                f"sampler 'allocate': {len(budget)} rollouts are too few for {len(prompts)} prompts with "
                f"`at_least` {self.at_least} each; raise rollout.num_generations ({num_generations}), or "
                "lower `at_least`"
            )
        self._predict(prompts)
        counts = self.divide(prompts, len(budget))
        self.given = {prompt.uid: count for prompt, count in zip(prompts, counts, strict=True)}
        return [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]

    def connect_value_model(self, values: Callable[[Sequence[Prompt]], list[float]]) -> None:
        """Set the function that estimates the value of prompts with the critic `value_model`."""
        self.values = values

    def _predict(self, prompts: Sequence[Prompt]) -> None:
        """Predict the pass rates of prompts with the value model, if there is one."""
        if not self.value_model or not prompts:
            return
        if self.values is None:
            raise ConfigError(f"sampler 'allocate': nobody connected the second model '{self.value_model}'")
        predicted = self.values(prompts)
        if not all(0.0 <= rate <= 1.0 for rate in predicted):
            raise ConfigError(
                f"sampler 'allocate': the values of '{self.value_model}' must be pass rates from 0 to 1, not "
                f"{min(predicted):g} to {max(predicted):g}; give its critic `probability: true`"
            )
        self.value.predicted = {p.uid: rate for p, rate in zip(prompts, predicted, strict=True)}

    def divide(self, prompts: Sequence[Prompt], budget: int) -> list[int]:
        """Divide `budget` rollouts over prompts by gain; ties go to the prompt with fewest rollouts."""
        counts = [self.at_least] * len(prompts)
        for total in range(sum(counts), budget):
            gains = [
                (self.gain(self.value, prompt, n, total, self.exploration), -n)
                for prompt, n in zip(prompts, counts, strict=True)
            ]
            usable = [i for i, n in enumerate(counts) if n < self.at_most and gains[i][0] > self.floor]
            if not usable:
                break
            counts[max(usable, key=gains.__getitem__)] += 1
        return counts

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Update the estimated pass rates with the rewards of a sampling round."""
        reward = reward_of(table, self.of)
        if not len(table):
            return
        counts = table.ids["on_policy"][:, 0].bool() & ~reward.isnan()
        for row in counts.nonzero()[:, 0].tolist():
            self.value.add(table.uids[row], [float(reward[row].clamp(0.0, 1.0))])

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the smallest and the largest number of rollouts of a prompt in the last draw."""
        given = list(self.given.values()) or [0]
        return {"sampler/rollouts_min": float(min(given)), "sampler/rollouts_max": float(max(given))}

    def state_dict(self) -> dict[str, Any]:
        """Return the pass rates of prompts, and the numbers of rollouts of the last step."""
        return {"value": self.value.state_dict(), "given": dict(self.given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the pass rates, and the numbers of rollouts of the last step."""
        self.value.load_state_dict(state["value"])
        self.given = dict(state["given"])


# ---- gain of one more rollout for a prompt that has n of the `total` rollouts of a step


def of_utility(value: PriorValue, prompt: Prompt, n: int, total: int, exploration: float) -> float:
    """Compute by how much one more rollout would increase the utility of V_0 (see `utility`)."""
    rate = value.rate(prompt)
    return utility(n + 1, rate) - utility(n, rate)


def of_baseline(value: PriorValue, prompt: Prompt, n: int, total: int, exploration: float) -> float:
    """Return the decrease of V_0.5's error D s / (D + s), where s = 1 / n and D is the error of the prior."""
    bias = value.bias(prompt)
    # D (1 / n) / (D + 1 / n) = D / (n D + 1)
    return bias / (n * bias + 1) - bias / ((n + 1) * bias + 1)


def of_interval(value: PriorValue, prompt: Prompt, n: int, total: int, exploration: float) -> float:
    """Return XRPO's priority: decrease of the half-width of the interval of the mean, plus a bonus."""
    spread = value.spread(prompt)
    falls = half_width(spread, n) - half_width(spread, n + 1)
    return falls + exploration * math.sqrt(math.log(1 + total) / n)


GAINS = {"v0": of_utility, "v05": of_baseline, "xrpo": of_interval}


def utility(n: int, rate: float) -> float:
    """Return V_0's utility of n rollouts at pass rate p: n (1 - p) (1 - (1 - p)^(n - 1))."""
    return n * (1 - rate) * (1 - (1 - rate) ** (n - 1))


def half_width(spread: float, n: int) -> float:
    """Return the half-width of the 95% interval of the mean of n >= 2 values with deviation `spread`."""
    return student_quantile(n - 1) * spread / math.sqrt(n)


@lru_cache(maxsize=1024)
def student_quantile(freedom: int, inside: float = 0.95) -> float:
    """Find the quantile t of Student's distribution with P(|T| < t) = `inside`, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < inside else (low, middle)
    return (low + high) / 2


def _student(t: float, freedom: int) -> float:
    """Compute P(|T| < t) for Student's distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):  # powers of the cosine up to `freedom` - 2
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
