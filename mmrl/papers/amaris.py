"""AMARIS (arXiv 2605.18592): a judge scores by weighted criteria, and a model edits them after failures.

Title: AMARIS: A Memory-Augmented Rubric Improvement System for Rubric-Based Reinforcement Learning
Formula: reward = sum_c w_c s_c / sum_c w_c, with scores s_c in [0, 1]; at most one edit per `update_every`
rounds.
Our reading: all numbers, prompts and the format of edits; only the abstract was read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import reward
from mmrl.core.answers import words_of
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Message, Outcome, Part, Prompt, Rollouts
from mmrl.data.fields import is_number
from mmrl.rewards.asking import (
    DATA,
    QUESTION,
    Judging,
    Unread,
    answer_of,
    is_empty,
    judge_prompt,
    judge_template,
    judge_words,
)
from mmrl.runtime.scoring import SCORING, by_prompt

Marks = tuple[tuple[float, ...], int, str]  # scores in [0, 1], index of the worst criterion, and why
REASONS = 3  # most frequent reasons stored in a memory item
LETTERS = 200  # of a stored reason
RUBRIC = f"""\
Judge an answer to a question by several criteria.

{QUESTION}
Answer{{{{ " (the last " + made + " above)" if made else "" }}}}:
{{{{ mark }}}}
{{{{ answer }}}}
{{{{ mark }}}}
{DATA}
Criteria:
{{{{ criteria }}}}

Say in a few sentences how well the answer meets each, then end with a score of every criterion in order, \
from {{{{ low }}}} to {{{{ high }}}}, the number of the one that it meets worst, and why, in a few words: \
<rubric>{{{{ example }}}}</rubric>
"""
ANALYST = """\
Answers to questions are judged by these criteria:
{criteria}

Failures that were found last:
{recent}

Earlier failures like them:
{similar}

Propose at most one change of the criteria, so that they tell good answers from bad ones better: add one, \
write one anew, or delete one. Each has to hold for other questions, too. There may be {most} criteria. End \
with <edit>{{"add": "..."}}</edit>, <edit>{{"update": 1, "text": "..."}}</edit>, \
<edit>{{"delete": 1}}</edit> or, for no change, <edit>{{}}</edit>.
"""


@dataclass(frozen=True)
class Failure:
    """Memory item: how many of the answers of a round failed a criterion, and the most frequent reasons."""

    step: int
    criterion: str
    count: int
    total: int
    why: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.count} of {self.total} answers by {self.criterion!r}: {self.why}"


@reward
@dataclass(kw_only=True, eq=False)
class Rubric(Judging):
    """Reward an answer with weighted scores by criteria that a model edits from failures (AMARIS).

    arXiv 2605.18592; our reading throughout, since only the abstract was read. A judge scores every answer by
    every criterion, and names the criterion that it meets worst, with a reason. After a round the failures of
    each criterion become one item of a memory. Every `update_every` rounds the same model reads the newest
    items and the most similar older ones (cosine of word counts, where the paper has an embedding) and
    proposes at most one edit before the next round (the paper: in parallel): add a criterion with the mean
    weight, rewrite one, or delete one. All answers of a round have the same criteria. The column `rubric` of
    completions has the version; a checkpoint has criteria, edits and memory. Evaluations keep the configured
    criteria. It reports `rubric/version`, `rubric/criteria`, `rubric/unread` (unreadable proposals) and logs
    `judge/unread`.

    Args:
        engine: As for `judge`; it also proposes edits.
        policy: As for `judge`.
        criteria: Initial criteria: weight by text.
        update_every: Rounds between proposals; 0: the criteria stay.
        recent: Newest memory items in a proposal.
        similar: Most similar older items in a proposal.
        max_criteria: Most criteria.
        max_memory: Items in memory, the newest.
        failed_below: An answer fails its worst criterion below this score, in [0, 1].
        scale: As for `judge`.
        tag: As for `judge`.
        reference: Show the target to the judge if there is one.
        ask_again: As for `judge`.
        device: As for `judge`.
    """

    criteria: Mapping[str, PositiveFloat]
    update_every: NonNegativeInt = 1
    recent: PositiveInt = 5
    similar: NonNegativeInt = 5
    max_criteria: PositiveInt = 8
    max_memory: PositiveInt = 1000
    failed_below: Probability = 0.5
    scale: tuple[float, float] = (1.0, 10.0)

    def __post_init__(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"`scale` of a rubric must rise, not be {list(self.scale)}")
        if not self.criteria or not all(is_number(w) and w > 0 for w in self.criteria.values()):
            raise ConfigError(
                f"`criteria` of a rubric are texts with weights above 0, not {dict(self.criteria)!r}"
            )
        words = {"question", "answer", "criteria", "example", "low", "high"}
        words |= {"reference", "columns", "mark", "made"}
        self.question = judge_template(RUBRIC, words, {"answer", "criteria"}, "rubric", "rubric")
        self.criteria = {text: float(weight) for text, weight in self.criteria.items()}
        self.asker = self.make_asker()
        self.memory: list[Failure] = []
        self.changes: list[str] = []  # as JSON, in order
        self.rounds = self.unread = 0
        self.failures: list[tuple[int, str]] = []  # of this round on this process: criterion and reason
        self.judged = 0
        self.tell_all: Callable[[Any], list[Any]] = lambda value: [value]

    def connect(self, ask: Callable[[Sequence[Prompt]], Rollouts], tell: Callable[[Any], list[Any]]) -> None:
        """Take the function that gathers values from all processes."""
        self.tell_all = tell

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | Unread]:
        """Compute the reward of every outcome; 0 for an empty one, `Unread` where there is no judgement."""
        questions, places = [], []
        for members in by_prompt(prompts).values():
            for number, i in enumerate(members):
                if not is_empty(outcomes[i], self.tag):
                    questions.append(self._question(prompts[i], outcomes[i], number))
                    places.append(i)
        wanted = f'{{"scores": [{len(self.criteria)} numbers], "worst": number, "why": text}}'
        rewards: list[float | Unread] = [0.0] * len(outcomes)
        total, failures = sum(self.criteria.values()), []
        judgements = self.asker.ask(questions, "rubric", wanted, self._read_marks)
        for i, marks in zip(places, judgements, strict=True):
            if isinstance(marks, Unread):
                rewards[i] = marks
                continue
            scores, worst, why = marks
            weighted = zip(scores, self.criteria.values(), strict=True)
            rewards[i] = sum(score * weight for score, weight in weighted) / total
            if scores[worst] < self.failed_below:
                failures.append((worst, why))
        # Assigned, not added: a failed call is repeated.
        self.failures, self.judged = failures, len(places)
        if call := SCORING.get(None):
            call.log_extra("rubric", [f"version {len(self.changes)}"] * len(outcomes))
        return rewards

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Store the failures of all processes in a round; edit the criteria every `update_every` rounds."""
        parts = self.tell_all([self.failures, self.judged])
        self.failures, judged, self.judged = [], sum(count for _, count in parts), 0
        self.rounds += 1
        texts = list(self.criteria)
        for place, text in enumerate(texts):
            whys = Counter(why for failures, _ in parts for worst, why in failures if worst == place)
            if whys:
                # Sorted by text too: the order of answers depends on the number of processes.
                ordered = sorted(whys, key=lambda why: (-whys[why], why))
                why = "; ".join(ordered[:REASONS])
                self.memory.append(Failure(self.stream.step, text, whys.total(), judged, why))
        self.memory = self.memory[-self.max_memory :]
        if self.memory and self.update_every and self.rounds % self.update_every == 0:
            (edit,) = self.asker.ask([self._proposal()], "edit", "one change as JSON", self._read_change)
            self._change(self.tell_all(None if isinstance(edit, Unread) else edit)[0])

    def pop_metrics(self) -> Mapping[str, float]:
        """Report version, number of criteria, and unreadable proposals since the last report."""
        unread, self.unread = self.unread, 0
        version, count = len(self.changes), len(self.criteria)
        return {"rubric/version": float(version), "rubric/criteria": float(count), "rubric/unread": unread}

    def state_dict(self) -> dict[str, Any]:
        """Return criteria, edits and memory."""
        memory = [asdict(item) for item in self.memory]
        state = {"criteria": dict(self.criteria), "changes": list(self.changes)}
        return {**state, "memory": memory, "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore criteria, edits and memory."""
        self.criteria, self.changes = dict(state["criteria"]), list(state["changes"])
        self.memory, self.rounds = [Failure(**item) for item in state["memory"]], state["rounds"]

    def _question(self, prompt: Prompt, outcome: Outcome, number: int) -> Prompt:
        low, high = self.scale
        example = {"scores": [high] * len(self.criteria), "worst": 1, "why": "it names no colour"}
        words = judge_words(self.stream, prompt, [outcome], self.reference)
        words |= {"answer": answer_of(outcome, self.tag), "example": json.dumps(example)}
        words |= {"criteria": "\n".join(f"{i}. {text}" for i, text in enumerate(self.criteria, 1))}
        words |= {"low": f"{low:g}", "high": f"{high:g}"}
        return judge_prompt(f"rubric/{prompt.uid}/{number}", prompt, [outcome], self.question(words))

    def _read_marks(self, written: str) -> Marks | None:
        low, high = self.scale
        match _json(written):
            case {"scores": [*scores], "worst": int(worst), "why": str(why)}:
                inside = [is_number(score) and low <= score <= high for score in scores]
                if len(scores) == len(self.criteria) and all(inside) and 1 <= worst <= len(scores):
                    scaled = tuple((score - low) / (high - low) for score in scores)
                    return scaled, worst - 1, _plain(why)[:LETTERS]
        return None

    def _proposal(self) -> Prompt:
        """Write the prompt for an edit, with the newest failures and the most similar older ones."""
        newest, older = self.memory[-self.recent :], self.memory[: -self.recent]
        recent = " ".join(f"{item.criterion} {item.why}" for item in newest)
        # The sort is stable: of equally similar items the newest comes first.
        ranked = sorted(reversed(older), key=lambda item: -likeness(f"{item.criterion} {item.why}", recent))
        text = ANALYST.format(
            criteria="\n".join(
                f"{i}. {text} (weight {weight:.3g})"
                for i, (text, weight) in enumerate(self.criteria.items(), 1)
            ),
            recent="\n".join(f"- {item}" for item in newest),
            similar="\n".join(f"- {item}" for item in ranked[: self.similar]) or "none",
            most=self.max_criteria,
        )
        return Prompt(f"rubric/{self.rounds}", (Message("user", (Part(text, quoted=True),)),))

    def _read_change(self, written: str) -> dict[str, Any] | None:
        """Parse an edit; None unless it is complete and can be applied."""
        count = len(self.criteria)
        match change := _json(written):
            case {"add": str(text), **rest} if text.strip() and not rest and count < self.max_criteria:
                return change if _plain(text) not in self.criteria else None
            case {"update": int(number), "text": str(text), **rest} if text.strip() and not rest:
                return change if 1 <= number <= count and _plain(text) not in self.criteria else None
            case {"delete": int(number), **rest} if 1 <= number <= count > 1 and not rest:
                return change
            case {**rest} if not rest:
                return {}
        return None

    def _change(self, change: Mapping[str, Any] | None) -> None:
        """Apply an edit to the criteria; None is an unreadable proposal."""
        self.unread += change is None
        listed = list(self.criteria.items())
        match change:
            case {"add": text}:
                listed.append((_plain(text), math.fsum(self.criteria.values()) / len(listed)))
            case {"update": number, "text": text}:
                listed[number - 1] = (_plain(text), listed[number - 1][1])
            case {"delete": number}:
                del listed[number - 1]
            case _:
                return
        self.criteria = dict(listed)
        self.changes.append(json.dumps(change, ensure_ascii=False))


def _json(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _plain(text: str) -> str:
    """Join a model's text to one line without the markers of chat templates and judgements."""
    return " ".join(answer_of(Outcome(text=text), "").split())


def likeness(one: str, other: str) -> float:
    """Cosine of the word counts of two texts; 0 if one has no words."""
    counts = [Counter(words_of(text)) for text in (one, other)]
    product = sum(counts[0][word] * counts[1][word] for word in counts[0])
    norms = [math.sqrt(sum(n * n for n in count.values())) for count in counts]
    return product / (norms[0] * norms[1]) if product else 0.0
