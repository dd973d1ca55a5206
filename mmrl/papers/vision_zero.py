"""Vision-Zero (arXiv 2509.25541): running baselines per role, and stages that train in turn.

Title: Vision-Zero: Scalable VLM Self-Improvement via Strategic Gamified Self-Play
Formula: b = decay b + (1 - decay) mean r of the role; A = r - b.
Our reading: means are over all games of a collection; a role without any reward keeps its b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

import torch

from mmrl.advantages.notes import tagged_as
from mmrl.config.ranges import NonNegativeInt, Probability, ShareBelowOne, Tag, TagWords
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.types import Rollouts


@advantage(turns=True)
class RoleBaseline:
    """Subtract a running mean of the rewards of each role (Vision-Zero, arXiv 2509.25541).

    b = decay b + (1 - decay) m, where m is the mean weighted reward of the role's turns in this collection,
    and A = r - b; every b begins at 0 and is updated first. Put it after `total`. Our readings: m is over all
    games of the collection, and a role without any reward keeps its b.

    Args:
        decay: Weight of what came before (the paper: 0.95, its code 0.9).
        role: Tag of the role.
        bias_correction: Subtract b / (1 - decay^t) after t updates of the role, which is no longer drawn
            to 0 at first; ours, neither the paper's nor its code's.
    """

    def __init__(
        self,
        *,
        decay: ShareBelowOne = 0.95,
        role: Tag = "role",
        bias_correction: bool = False,
        stream: Stream,
    ) -> None:
        self.decay, self.role, self.stream, self.bias_correction = decay, role, stream, bias_correction
        self.means: dict[str, float] = {}  # by role, before the step `at`
        self.updates: dict[str, int] = {}  # by role, those of `means`
        self.sums: dict[str, list[float]] = {}  # of the rewards of step `at`, and their number
        self.at = -1

    def baselines(self) -> dict[str, float]:
        """Return the baseline of every role, updated with this collection."""
        running, updates = self._running()
        if not self.bias_correction:
            return running
        return {role: corrected(mean, self.decay, updates[role]) for role, mean in running.items()}

    def _running(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return b and the number of its updates by role, with the collection of this step."""
        updates = {
            role: self.updates.get(role, 0) + (role in self.sums) for role in {*self.means, *self.sums}
        }
        means = {role: total / count for role, (total, count) in self.sums.items()}
        kept = {role: self.means.get(role, 0.0) for role in {*self.means, *means}}
        running = {
            role: self.decay * before + (1 - self.decay) * means[role] if role in means else before
            for role, before in kept.items()
        }
        return running, updates

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Add the rewards of a round."""
        if self.stream.step != self.at:
            self.means, self.updates = self._running()
            self.sums, self.at = {}, self.stream.step
        if not len(table):
            return
        roles, known, rewards = tagged_as(table, self.role), table.valid.any(1), table.weighted_sum()
        for role in roles[known].unique().tolist():
            mine = rewards[known & (roles == role)]
            total, count = self.sums.get(str(role), [0.0, 0])
            self.sums[str(role)] = [total + float(mine.sum()), count + len(mine)]

    def __call__(self, table: RewardTable) -> RewardTable:
        """Subtract the baselines."""
        roles, values = tagged_as(table, self.role), table.values
        for role, baseline in self.baselines().items():
            values = torch.where((roles == int(role))[:, None] & table.valid, values - baseline, values)
        return table.put(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the means, their updates, and the sums by role."""
        numbers = {"means": dict(self.means), "updates": dict(self.updates), "sums": dict(self.sums)}
        return {**numbers, "at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.means, self.updates = dict(state["means"]), dict(state["updates"])
        self.sums, self.at = dict(state["sums"]), state["at"]


def corrected(mean: float, decay: float, updates: int) -> float:
    """Divide a running mean that began at 0 by the sum of its weights, 1 - decay^updates; 0 before any."""
    return mean / (1 - decay**updates) if updates else 0.0


@dataclass(frozen=True)
class Stage:
    """State of the alternation: current stage, its duration, and running means of its measures."""

    clue: bool = False
    dwell: int = 0  # collections of this stage that are over
    updates: int = 0  # of the running means
    accuracy: float = 0.0
    unanswered: float = 0.0


@advantage(turns=True, tags={"stage"})
class Alternate:
    """Learn from the rows of one stage at a time, and change stages by how well they do (Vision-Zero).

    The rows have a tag `stage`. It begins with `decide`; once the running accuracy of decisions is high and
    few are left open, `clue` learns, until decisions get worse again (arXiv 2509.25541, section 12 of its
    hysteresis). Rows of the other stage count in no denominator. A collection changes the stage of the next
    one. Labels are read at the turns of `decide`; a collection without any changes no running mean. Stages of
    a fixed length, as in the code of the paper, have it as `min_stay` and as `patience`.

    Args:
        of: Label that is 1 for a right decision and 0 for a wrong one. The paper counts a game once, by the
            vote that most players gave: `spy_caught` of `vision.spy`, equal for all votes of a game.
        unanswered: Label that is 1 for a decision that was left open; empty: there is none.
        decide: Word of the tag `stage` for decisions.
        clue: Word for clues.
        rho: Weight of what came before in both running means, which begin at 0.
        high: Accuracy from which clues learn.
        few: Largest share of open decisions for that.
        low: Error from which decisions learn again.
        many: Share of open decisions from which they do.
        min_stay: Collections that a stage lasts at least.
        patience: Collections after which a stage ends in any case; 0: never.
        bias_correction: Compare running means divided by 1 - rho^t after t collections. Those of the paper
            begin at 0, so that even perfect decisions reach 0.9 after 45 collections only (rho 0.95).
    """

    def __init__(
        self,
        *,
        of: str,
        unanswered: str = "",
        decide: str = "decide",
        clue: str = "clue",
        rho: ShareBelowOne = 0.95,
        high: Probability = 0.9,
        few: Probability = 0.1,
        low: Probability = 0.4,
        many: Probability = 0.5,
        min_stay: NonNegativeInt = 5,
        patience: NonNegativeInt = 20,
        bias_correction: bool = False,
        stream: Stream,
    ) -> None:
        self.of, self.unanswered, self.words = of, unanswered, (decide, clue)
        self.rho, self.high, self.few, self.low, self.many = rho, high, few, low, many
        self.min_stay, self.patience, self.stream = min_stay, patience, stream
        self.bias_correction = bias_correction
        self.stage, self.at = Stage(), -1
        self.sums = [0.0, 0.0, 0.0]  # of step `at`: decisions, right ones, open ones

    def current(self) -> Stage:
        """Return the stage of this step."""
        return self.stage if self.stream.step == self.at else self._after()

    def _after(self) -> Stage:
        """Return the stage after the collection of step `at`."""
        if self.at < 0:
            return self.stage
        stage, (count, right, left_open) = replace(self.stage, dwell=self.stage.dwell + 1), self.sums
        if count:
            accuracy = self.rho * stage.accuracy + (1 - self.rho) * right / count
            unanswered = self.rho * stage.unanswered + (1 - self.rho) * left_open / count
            stage = replace(stage, updates=stage.updates + 1, accuracy=accuracy, unanswered=unanswered)
        accuracy, unanswered = (
            corrected(mean, self.rho, stage.updates) if self.bias_correction else mean
            for mean in (stage.accuracy, stage.unanswered)
        )
        if stage.clue:
            change = 1 - accuracy >= self.low or unanswered >= self.many
        else:
            change = accuracy >= self.high and unanswered <= self.few
        forced = self.patience > 0 and stage.dwell >= self.patience
        if forced or (change and stage.dwell >= self.min_stay):
            return replace(stage, clue=not stage.clue, dwell=0)
        return stage

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Measure the decisions of a round."""
        if self.stream.step != self.at:
            self.stage, self.sums, self.at = self._after(), [0.0, 0.0, 0.0], self.stream.step
        if not len(table):
            return
        for name in filter(None, (self.of, self.unanswered)):
            if name not in table.scored:
                raise ValueError(f"`alternate` reads '{name}', but there are {', '.join(table.scored)}")
        decided = (tagged_as(table, "stage") == name_id(self.words[0])) & ~table.scored[self.of].isnan()
        left_open = table.scored[self.unanswered].nan_to_num() if self.unanswered else torch.zeros(())
        added = (decided.sum(), table.scored[self.of][decided].sum(), (left_open * decided).sum())
        self.sums = [before + float(more) for before, more in zip(self.sums, added, strict=True)]

    def __call__(self, table: RewardTable) -> RewardTable:
        """Leave the turns of the other stage out."""
        other = name_id(self.words[0] if self.current().clue else self.words[1])
        return table.replace(learn=table.learn & (tagged_as(table, "stage") != other))

    def state_dict(self) -> dict[str, Any]:
        """Return the stage, and the sums of the last step."""
        return {"stage": asdict(self.stage), "sums": list(self.sums), "at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.stage, self.sums, self.at = Stage(**state["stage"]), list(state["sums"]), state["at"]


@advantage(turns=True)
def for_turns(
    table: RewardTable,
    *,
    advantage: tuple[Callable[[RewardTable], RewardTable], ...],
    where: TagWords,
) -> RewardTable:
    """Apply advantage functions to the turns with a tag; the other turns count in nothing and stay.

    `for_some` does this for whole rows. Raises `ValueError` where the functions change rewards or places.

    Args:
        advantage: The functions, in order.
        where: Words by tag that a turn must have, such as `{stage: clue}`.
    """
    inside = table.present.clone()
    for tag, word in where.items():
        inside &= tagged_as(table, tag) == name_id(word)
    inside = inside[:, None]
    part = table.replace(valid=table.valid & inside)
    made = reduce(lambda made, function: function(made), advantage, part)
    if made.names != table.names or made.ends.shape != table.ends.shape:
        raise ValueError(
            f"`for_turns` must keep the rewards and places of its turns, but {made.names} came of "
            f"{table.names}; put `total` before it, and pieces that work on single steps after it"
        )
    return table.replace(
        values=torch.where(inside, made.values, table.values),
        valid=torch.where(inside, made.valid, table.valid),
        learn=torch.where(inside[:, 0], made.learn, table.learn),
    )
