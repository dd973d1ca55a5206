"""GEAR (arXiv 2509.24096): a curriculum prefers the sources of data whose reward rises fastest.

Title: GEAR: A General Evaluation Framework for Abductive Reasoning
Formula: p(source) ~ max(velocity, 0) + floor; velocity: moving average of changes of its mean reward.
Our reading: everything, since only the abstract was read; sources take the place of the paper's objectives;
hypotheses predict by a function of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import PositiveFloat, ShareBelowOne
from mmrl.config.registry import import_name, reward, sampler
from mmrl.core.answer_text import tagged
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt, Rollouts
from mmrl.samplers.candidates import evenness, reward_of
from mmrl.samplers.sources import Sources, sources_of

Predictions = Sequence[Any]  # of one hypothesis, an entry for each input; None: no valid output


@reward
class AbductionScore:
    """Score the hypotheses of an answer without a right one: consistency, generalizability or diversity.

    GEAR (arXiv 2509.24096, abstract; formulas are our reading). A hypothesis is consistent if it predicts all
    pairs of the column `observed`, a list of [input, output]. `consistency`: fraction of consistent
    hypotheses. `generalizability`: fraction of the inputs in the column `held_out` for which they have an
    output, averaged over consistent hypotheses. `diversity`: fraction of held-out inputs on which two of them
    disagree, averaged over pairs; 0 without a pair.

    Args:
        predict: Function `package.module:function` of a hypothesis (text) and a list of inputs, which returns
            a list of outputs, None where there is none. It runs in this process: never execute text in it.
        score: What is returned.
        tag: Tag of a hypothesis; an answer may have several.
    """

    def __init__(
        self,
        *,
        predict: str,
        score: Literal["consistency", "generalizability", "diversity"] = "consistency",
        tag: str = "hypothesis",
    ) -> None:
        try:
            self.predict: Callable[[str, list[Any]], Predictions] = import_name(predict)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"`predict` must be package.module:function, not '{predict}'") from error
        self.score, self.tag = score, tag

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the score of every answer; 0 without a consistent hypothesis."""
        return [self._scored(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]

    def _scored(self, prompt: Prompt, outcome: Outcome) -> float:
        if missing := {"observed", "held_out"} - set(prompt.columns):
            raise ValueError(f"abduction_score: prompt '{prompt.uid}' has no column '{min(missing)}'")
        inputs, outputs = zip(*prompt.columns["observed"], strict=True)
        hypotheses = tagged(outcome.text or "", self.tag)
        consistent = [text for text in hypotheses if list(self.predict(text, [*inputs])) == [*outputs]]
        if not consistent:
            return 0.0
        if self.score == "consistency":
            return len(consistent) / len(hypotheses)
        predicted = [self.predict(text, list(prompt.columns["held_out"])) for text in consistent]
        if self.score == "generalizability":
            return mean([value is not None for values in predicted for value in values])
        pairs = [zip(*pair, strict=True) for pair in combinations(predicted, 2)]
        return mean([one != other for pair in pairs for one, other in pair])


def mean(values: Sequence[bool]) -> float:
    """Return the fraction of true values; 0 without values."""
    return sum(values) / len(values) if values else 0.0


@sampler
class LearningVelocity:
    """Prefer sources of data with a fast rising reward (GEAR's momentum curriculum, arXiv 2509.24096).

    The velocity of a source is the moving average of the changes of its mean reward from one step with
    rollouts of it to the next; sources are drawn in proportion to max(velocity, 0) + `floor`. Our reading
    throughout, since only the abstract could be read: its objectives are sources, constants are ours.

    Args:
        by: Column whose values are the sources; "": the split of the data set.
        of: Name of the reward that is followed; "": the weighted sum.
        decay: Share of the old velocity in the new one.
        floor: Added to every velocity, in units of reward, so that no open source is forgotten.
        open_at: Mean reward of a source at which the next one, in the order of the data, is drawn from as
            well; null: all sources are open from the start. A source that was opened stays open.
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        by: str = "",
        of: str = "",
        decay: ShareBelowOne = 0.9,
        floor: PositiveFloat = 0.05,
        open_at: float | None = None,
    ) -> None:
        self.stream, self.among = (
            stream,
            Sources(data, stream, sources_of(data, by, "learning_velocity"), "learning_velocity"),
        )
        self.of, self.decay, self.floor, self.open_at = of, decay, floor, open_at
        size = len(self.among.names)
        self.level = torch.full((size,), torch.nan, dtype=torch.float64)  # the last mean reward
        self.velocity = torch.zeros(size, dtype=torch.float64)
        self.opened = size if open_at is None else 1
        self.sums, self.counts = torch.zeros_like(self.velocity), torch.zeros_like(self.velocity)  # of a step

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw a source for every prompt, and a prompt of it; no prompt twice."""
        if self.among.candidates.begins():
            self.sums.zero_()
            self.counts.zero_()
        return self.among.draw(self.probabilities, num_prompts, num_generations)

    @property
    def probabilities(self) -> Tensor:
        """The probability of every source: (S,)."""
        weights = self.velocity.clamp(min=0.0) + self.floor
        weights[self.opened :] = 0.0
        return weights / weights.sum()

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Add the rewards of a round to the sums of the step."""
        reward = reward_of(table, self.of)
        for place, rows in self.among.candidates.rows(table, ~reward.isnan()).items():
            source = int(self.among.source[place])
            self.sums[source] += reward[rows].sum()
            self.counts[source] += len(rows)

    def observe_advantages(self, credit: RewardTable) -> None:
        """End the step: update velocities, and open the next source where the last one is good enough."""
        seen = self.counts > 0
        level = torch.where(seen, self.sums / self.counts.clamp(min=1), self.level)
        moved = seen & ~self.level.isnan()  # the first mean is no change
        fresh = self.decay * self.velocity + (1 - self.decay) * (level - self.level)
        self.velocity = torch.where(moved, fresh, self.velocity)
        self.level = level
        while (
            self.open_at is not None and self.opened < len(level) and level[self.opened - 1] >= self.open_at
        ):
            self.opened += 1
        self.sums.zero_()
        self.counts.zero_()

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how even the draws are over the sources, and the probability of each."""
        chance = self.probabilities
        named = {f"sampler/share/{name}": share for name, share in self.among.of(chance).items()}
        return {"sampler/entropy": evenness(chance), **named}

    def state_dict(self) -> dict[str, Any]:
        """Return levels and velocities by source, and how many sources are open."""
        return {
            "level": self.among.of(self.level),
            "velocity": self.among.of(self.velocity),
            "opened": self.opened,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore levels and velocities; a source that was not there before begins without any."""
        for i, name in enumerate(self.among.names):
            self.level[i] = state["level"].get(name, torch.nan)
            self.velocity[i] = state["velocity"].get(name, 0.0)
        self.opened = min(state["opened"], len(self.among.names))
