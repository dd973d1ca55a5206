"""A sampler that adds hints to prompts whose answers all failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import sampler
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.data.hints import TAG, TEMPLATE, check_hints, tiers, wanting_hint, with_hint
from mmrl.samplers.answers import ReadsAnswers

PATIENCE = 10  # consecutive steps with failed prompts but no second round before an error


def rewards_of(table: RewardTable, of: str) -> list[float]:
    """List the reward named `of` of every row, or the weighted sum of rewards if `of` is empty."""
    return (table.at_end(of) if of else table.reward()).tolist()


@dataclass
class Failed:
    """A failed prompt, one of its answers, and the number of hints shown since."""

    prompt: Prompt
    answer: str = ""  # input of the model that writes hints
    shown: int = 0


@sampler(sets_tags={TAG})
class WithHints(ReadsAnswers):
    """Repeat failed prompts with hints, from the weakest to the strongest (Scaf-GRPO, arXiv 2510.19807).

    A prompt fails if none of its answers has a reward above `threshold`. With `when: next_round` it comes
    again in the next sampling rounds of the step, `num_hinted` times per hint, until an answer succeeds; this
    needs `rollout.max_rounds` of 2 or more and a `group_filter` that drops failed groups, such as `varied`.
    Plain and hinted answers share an id and form one group, in which the advantage `first_success` replaces a
    failure as in the paper. With `when: next_time` all rollouts have the next hint when the prompt is drawn
    again, until it succeeds. The policy learns the answers given the hint, unless `vision.without_hints` is
    the last engine.

    A hint column holds a list of texts, or one text (a solution) that is revealed sentence by sentence.
    Without a column, the engine `with_hinter` writes `written` hints from the first failed answer (HiLL,
    arXiv 2604.00698), and the advantage `best_hint` chooses among them.

    Args:
        sampler: The wrapped sampler.
        hint_column: Column of the data with the hints; an empty cell means no hints.
        written: Number of hints to write for a prompt instead of a column; HiLL's code: 4.
        hint_template: Text after the question; `{hint}` is the hint.
        cuts: Number of hints into which a single text is split.
        when: Time of the next hint. `next_round`: in the same step. `next_time`: at the prompt's next draw.
        num_hinted: Rollouts per hint in a sampling round.
        hints_per_round: Hints of a prompt per sampling round; Scaf-GRPO has 12 in all.
        start: Steps without hints at the start; Scaf-GRPO: 50.
        of: Name of the reward that must be above `threshold`; empty: the weighted sum.
        threshold: Largest reward that counts as a failure.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        stream: Stream,
        train_prompts: Sequence[Prompt] = (),
        hint_column: str = "",
        written: NonNegativeInt = 0,
        hint_template: str = TEMPLATE,
        cuts: PositiveInt = 4,
        when: Literal["next_round", "next_time"] = "next_round",
        num_hinted: PositiveInt = 1,
        hints_per_round: PositiveInt = 1,
        start: NonNegativeInt = 0,
        of: str = "",
        threshold: float = 0.0,
    ) -> None:
        if bool(hint_column) == bool(written) or (written and when == "next_time"):
            raise ConfigError(
                "the sampler 'with_hints' shows the hints of a `hint_column`, or those that the engine "
                "`with_hinter` writes: set `written` to their number instead, with `when: next_round`"
            )
        if hint_column:
            check_hints(train_prompts, hint_column, hint_template)
        self.sampler, self.stream, self.hint_column, self.written = sampler, stream, hint_column, written
        self.hint_template, self.cuts, self.when = hint_template, cuts, when
        self.num_hinted, self.hints_per_round = num_hinted, hints_per_round
        self.start, self.of, self.threshold = start, of, threshold
        self.asked: dict[str, Prompt] = {}  # prompts of this step, without hints
        self.failed: dict[str, Failed] = {}  # failed prompts of this step with hints left
        self.level: dict[str, int] = {}  # hints shown without success, by uid (`next_time`)
        self.ignored = 0  # steps with failed prompts but no second round (`next_round`)
        self.counts = {"hints/prompts": 0.0, "hints/solved": 0.0}

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw failed prompts of this step with their next hints, and new prompts for the rest."""
        if self.stream.round == 0:
            self.asked, self.failed = {}, {}
        else:
            self.ignored = 0
        again = [failed for failed in self.failed.values() if self._left(failed)][:num_prompts]
        hinted = [prompt for failed in again for prompt in self._next(failed)]
        missing = num_prompts - len(again)
        fresh = self.sampler.draw(missing, num_generations) if missing else []
        self.asked.update((prompt.uid, prompt) for prompt in fresh)
        if self.when == "next_time":
            fresh = [self._remembered(prompt) for prompt in fresh]
        return hinted + fresh

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Record which prompts failed and which hints helped."""
        texts = self.texts(rollouts, table) if self.written else [""] * len(table)
        best: dict[str, float] = {}
        first: dict[str, str] = {}
        for uid, text, reward in zip(table.uids, texts, rewards_of(table, self.of), strict=True):
            if uid in self.asked and not math.isnan(reward):
                best[uid] = max(reward, best.get(uid, -math.inf))
                first.setdefault(uid, text)
        solved = {uid: reward > self.threshold for uid, reward in best.items()}
        if self.when == "next_time":
            self._remember(solved)
            return
        for uid, success in solved.items():
            if uid in self.failed and success:
                self.counts["hints/solved"] += 1
                del self.failed[uid]
            elif uid not in self.failed and not success and self.stream.step >= self.start:
                self.failed[uid] = Failed(self.asked[uid], first[uid])
        failures = (self.asked[uid] for uid, success in solved.items() if not success)
        if self.stream.round == 0 and any(map(self._hints, failures)):
            self._expect_a_round()

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the number of prompts with hints, and how many of them succeeded."""
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0.0)
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the hint levels of prompts; checkpoints are never written between sampling rounds."""
        return {"level": dict(self.level), "ignored": self.ignored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the hint levels of prompts."""
        self.level, self.ignored = dict(state["level"]), state["ignored"]

    def _expect_a_round(self) -> None:
        """Count steps with failures but without a second sampling round; raise after `PATIENCE` of them."""
        self.ignored += 1
        if self.ignored > PATIENCE:
            raise ConfigError(
                f"the sampler 'with_hints' asks again in a second round, but none came in {PATIENCE} steps "
                "with failures; set `rollout.max_rounds` to 2 or more and `group_filter: varied`, which "
                "drops failed groups, or `when: next_time`"
            )

    def _hints(self, prompt: Prompt) -> list[str]:
        return [""] * self.written or tiers(prompt.columns.get(self.hint_column), self.cuts)

    def _left(self, failed: Failed) -> bool:
        return failed.shown < len(self._hints(failed.prompt))

    def _hinted(self, prompt: Prompt, level: int) -> Prompt:
        """Return the prompt with the hint of a level, counted from 1."""
        hint = self._hints(prompt)[level - 1]
        return with_hint(prompt, hint, tag=str(level), template=self.hint_template)

    def _next(self, failed: Failed) -> list[Prompt]:
        """Return a copy of a failed prompt for each of its next hints, and update the counts."""
        self.counts["hints/prompts"] += failed.shown == 0
        first, most = failed.shown, len(self._hints(failed.prompt))
        failed.shown = min(first + self.hints_per_round, most)
        levels = range(first + 1, failed.shown + 1)
        if self.written:
            shown = [wanting_hint(failed.prompt, failed.answer, tag=str(level)) for level in levels]
        else:
            shown = [self._hinted(failed.prompt, level) for level in levels]
        return [prompt for prompt in shown for _ in range(self.num_hinted)]

    def _remembered(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the hint of its current level, for `next_time`."""
        level = min(self.level.get(prompt.uid, 0), len(self._hints(prompt)))
        return self._hinted(prompt, level) if level else prompt

    def _remember(self, solved: Mapping[str, bool]) -> None:
        """Increment the hint level of failed prompts, and reset that of solved prompts."""
        for uid, success in solved.items():
            hinted = bool(self.level.get(uid))
            self.counts["hints/prompts"] += hinted
            self.counts["hints/solved"] += hinted and success
            if success:
                self.level.pop(uid, None)
            elif self.stream.step >= self.start and (most := len(self._hints(self.asked[uid]))):
                self.level[uid] = min(self.level.get(uid, 0) + 1, most)
