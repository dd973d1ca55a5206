"""AMARIS (arXiv 2605.18592): a model judges by weighted criteria, remembers failures, and edits the criteria.

Title: AMARIS: A Memory-Augmented Rubric Improvement System for Rubric-Based Reinforcement Learning
Formula: reward = sum_c w_c s_c / sum_c w_c, with scores s_c in [0, 1]; every `update_every` rounds at most
one change.
Our reading: all numbers, the texts and the form of changes; only the abstract was read.
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

REASONS = 3  # different reasons of failures that an item of the memory holds
LETTERS = 200  # of a reason
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
    """What failed in a round by one criterion: `count` of `total` answers, and why."""

    step: int
    criterion: str
    count: int
    total: int
    why: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.count} of {self.total} answers by {self.criterion!r}: {self.why}"


@dataclass(frozen=True)
class Marks:
    """What a judge says of an answer: scores from 0 to 1, and the place and the reason of the worst one."""

    scores: tuple[float, ...]
    worst: int
    why: str


@reward
@dataclass(kw_only=True, eq=False)
class Rubric(Judging):
    """Reward an answer with its weighted scores by criteria that a model edits from failures (AMARIS).

    arXiv 2605.18592, of which only the abstract was read; our reading. A judge scores every answer by every
    criterion and says which is met worst, and why. After a round, the failures of each criterion become an
    item of a memory. Every `update_every` rounds the same model sees the newest items and those most like
    them, and proposes at most one change: a new criterion (with the mean weight), another text, or one less.
    So all answers of a round have the same criteria, and the next round has the next version; weights are
    divided by their sum. The column `rubric` of completions holds the version, a checkpoint the criteria, the
    changes and the memory. Evaluations keep the criteria of the configuration. Our readings besides: items
    are compared by the cosine of their word counts, where the paper has an embedding, and the change is made
    before the next round, where the paper makes it beside training. It reports `rubric/version`,
    `rubric/criteria`, `rubric/unread` (proposals that could not be read) and logs `judge/unread`.

    Args:
        engine: As for `judge`; it also proposes changes.
        policy: As for `judge`.
        criteria: Weights of the criteria at the start, by their texts.
        update_every: Rounds from one proposal to the next; 0: the criteria stay.
        recent: Newest items of the memory that a proposal reads.
        similar: Further items that it reads, those most like the newest.
        max_criteria: The most criteria.
        max_memory: Items that are kept, the newest.
        failed_below: An answer fails by its worst criterion below this score, on a scale from 0 to 1.
        scale: As for `judge`.
        tag: As for `judge`.
        reference: Show the target where there is one.
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
        known = {"question", "answer", "criteria", "example", "low", "high"}
        known |= {"reference", "columns", "mark", "made"}
        self.question = judge_template(RUBRIC, known, {"answer", "criteria"}, "rubric", "rubric")
        self.criteria = {text: float(weight) for text, weight in self.criteria.items()}
        self.asker = self.make_asker()
        self.memory: list[Failure] = []
        self.changes: list[str] = []  # as JSON, in order
        self.rounds = self.unread = 0
        self.found: list[tuple[int, str]] = []  # failures of this round on this process
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
        whole, failures = sum(self.criteria.values()), []
        for i, marks in zip(
            places, self.asker.ask(questions, "rubric", wanted, self._read_marks), strict=True
        ):
            if isinstance(marks, Unread):
                rewards[i] = marks
                continue
            weighted = zip(marks.scores, self.criteria.values(), strict=True)
            rewards[i] = sum(score * weight for score, weight in weighted) / whole
            if marks.scores[marks.worst] < self.failed_below:
                failures.append((marks.worst, marks.why))
        # Set and not added, because a call that failed is made again.
        self.found, self.judged = failures, len(places)
        if call := SCORING.get(None):
            call.log_extra("rubric", [f"version {len(self.changes)}"] * len(outcomes))
        return rewards

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Remember the failures of a round on all processes, and change the criteria when it is time."""
        parts = self.tell_all([self.found, self.judged])
        self.found, judged, self.judged = [], sum(count for _, count in parts), 0
        self.rounds += 1
        texts = list(self.criteria)
        for place, text in enumerate(texts):
            whys = Counter(why for found, _ in parts for worst, why in found if worst == place)
            if whys:
                # By number and letters: the order of answers depends on the number of processes.
                ordered = sorted(whys, key=lambda why: (-whys[why], why))
                why = "; ".join(ordered[:REASONS])
                self.memory.append(Failure(self.stream.step, text, whys.total(), judged, why))
        self.memory = self.memory[-self.max_memory :]
        if self.memory and self.update_every and self.rounds % self.update_every == 0:
            (proposed,) = self.asker.ask([self._proposal()], "edit", "one change as JSON", self._read_change)
            readable = None if isinstance(proposed, Unread) else proposed
            self._change(self.tell_all(readable)[0])

    def metrics(self) -> Mapping[str, float]:
        """Report the version, the number of criteria, and proposals that could not be read since the last."""
        unread, self.unread = self.unread, 0
        version, count = len(self.changes), len(self.criteria)
        return {"rubric/version": float(version), "rubric/criteria": float(count), "rubric/unread": unread}

    def state_dict(self) -> dict[str, Any]:
        """Return the criteria, their changes and the memory."""
        return {
            "criteria": dict(self.criteria),
            "changes": list(self.changes),
            "memory": [asdict(item) for item in self.memory],
            "rounds": self.rounds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.criteria, self.changes = dict(state["criteria"]), list(state["changes"])
        self.memory, self.rounds = [Failure(**item) for item in state["memory"]], state["rounds"]

    def _question(self, prompt: Prompt, outcome: Outcome, number: int) -> Prompt:
        low, high = self.scale
        example = {"scores": [high] * len(self.criteria), "worst": 1, "why": "it names no colour"}
        words = {
            **judge_words(self.stream, prompt, [outcome], self.reference),
            "answer": answer_of(outcome, self.tag),
            "criteria": "\n".join(f"{i}. {text}" for i, text in enumerate(self.criteria, 1)),
            "example": json.dumps(example),
            "low": f"{low:g}",
            "high": f"{high:g}",
        }
        return judge_prompt(f"rubric/{prompt.uid}/{number}", prompt, [outcome], self.question(words))

    def _read_marks(self, written: str) -> Marks | None:
        low, high = self.scale
        match _json(written):
            case {"scores": [*scores], "worst": int(worst), "why": str(why)}:
                inside = [is_number(score) and low <= score <= high for score in scores]
                if len(scores) == len(self.criteria) and all(inside) and 1 <= worst <= len(scores):
                    scaled = tuple((score - low) / (high - low) for score in scores)
                    return Marks(scaled, worst - 1, _plain(why)[:LETTERS])
        return None

    def _proposal(self) -> Prompt:
        """Ask for a change, with the newest failures and those like them."""
        newest, before = self.memory[-self.recent :], self.memory[: -self.recent]
        asked = " ".join(f"{item.criterion} {item.why}" for item in newest)
        # The newest first among those that are equally alike.
        ranked = sorted(reversed(before), key=lambda item: -likeness(f"{item.criterion} {item.why}", asked))
        text = ANALYST.format(
            criteria="\n".join(
                f"{i}. {text} (weight {weight:.3g})"
                for i, (text, weight) in enumerate(self.criteria.items(), 1)
            ),
            recent="\n".join(f"- {item}" for item in newest),
            similar="\n".join(f"- {item}" for item in ranked[: self.similar]) or "none",
            most=self.max_criteria,
        )
        return Prompt(f"rubric/{self.rounds}", (Message("user", (Part(text, said=True),)),))

    def _read_change(self, written: str) -> dict[str, Any] | None:
        """Read a change that can be made; None for anything else."""
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
        """Make a change of the criteria; None stands for one that could not be read."""
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
    """Write what a model said in one line, without what a template or a judgement is marked with."""
    return " ".join(answer_of(Outcome(text=text), "").split())


def likeness(one: str, other: str) -> float:
    """Return the cosine of the word counts of two texts; 0 where one has no words."""
    counts = [Counter(words_of(text)) for text in (one, other)]
    product = sum(counts[0][word] * counts[1][word] for word in counts[0])
    norms = [math.sqrt(sum(n * n for n in count.values())) for count in counts]
    return product / (norms[0] * norms[1]) if product else 0.0
