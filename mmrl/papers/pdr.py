"""PDR (arXiv 2510.01123): rounds of parallel drafts and a bounded summary of them, then the answer.

Title: Rethinking Thinking Tokens: LLMs as Improvement Operators
Formula: y ~ p(. | x, C_R), with C_r a bounded text made of the drafts y_1..y_M ~ p(. | x, C_(r-1)).
Our reading: sizes and texts; only notes on the paper were read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import fmean
from typing import ClassVar, Literal

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.config.schema import ConfigError
from mmrl.core.answer_text import tagged
from mmrl.core.answers import exact_text
from mmrl.core.rng import Stream
from mmrl.core.types import CHANGED, Part, Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.continuing import ContinuingEngine

Role = Literal["draft", "distil", "refine"]
# Marks of chat templates and tags, which a draft must not bring into a prompt.
MARKUP = re.compile(r"<(?=[|\N{FULLWIDTH VERTICAL LINE}]|/?[A-Za-z_])")
WORKSPACE = """

Notes from earlier attempts, which may be wrong:
{workspace}

Use what is right in them, and answer."""
SUMMARY = (
    "\n\nBelow are answers to this. Write short notes for a new attempt: on what they agree, where they "
    "contradict each other, and what is still open.\n{drafts}\n"
)


@dataclass(eq=False)
class Attempt:
    """One chain of drafts and answers: prompt, number of final answers, and the texts so far."""

    prompt: Prompt
    name: str  # different for every attempt at the prompt in a step
    answers: int
    workspace: str = ""
    rows: list[tuple[Role, int, Trajectory]] = field(default_factory=list)  # with their rounds
    settled: Trajectory | None = None  # the draft that is the answer, where drafts agreed

    def asked(self, role: Role, number: int, text: str) -> Prompt:
        """Append a text to the prompt; the id is new, so that it draws numbers of its own."""
        uid = f"{self.prompt.uid}#{self.name}/{role}{number}"
        if not text:
            return replace(self.prompt, uid=uid)
        *before, last = self.prompt.messages
        asked = replace(last, parts=(*last.parts, Part(text, quoted=True)))
        return replace(self.prompt, uid=uid, messages=(*before, asked))


@engine(scope="vision", sets_tags={"role", "round", "workspace", "episode", "turn", CHANGED})
@dataclass(eq=False)
class WithDrafts:
    """Answer from drafts of the policy's own: parallel drafts, notes made of them, a refined answer (PDR).

    Parallel, distil, refine and sequential refinement of arXiv 2510.01123. In every round the policy answers
    a prompt several times; of the drafts, short notes are made, which stand after the question in the next
    round and are made anew each time; the answers read the last ones. It wraps `vision.generate` or
    `vision.vllm`. The answers to a prompt share drafts and notes (`shared`), so that they answer the same
    prompt and are compared as ever; otherwise, and in evaluations, every answer has drafts of its own. The
    tags `role` (draft, distil or refine) and `round` tell rows apart, the tag `workspace` is the same for
    answers that read the same notes. Where drafts are not shared, the rows of an answer are an episode with
    the tag `turn` for the round. Answers record `tokens_total` and `tokens_sequential`: tokens in and out of
    all calls, and of those that cannot run at the same time. `replay` keeps none of these rows. Our readings:
    the texts, and that drafts without an answer are left out.

    Args:
        rounds: Drafts of every round before the answers; `[1, 1]` with `distil: last` is sequential
            refinement.
        distil: Notes are the `top_k` drafts of most agreement (by the size of the cluster of equal answers,
            then by mean log-probability), `random_k`, the `last` draft, or a `summary` that the policy
            writes.
        keep: Drafts that `top_k` and `random_k` keep.
        max_workspace_tokens: The most tokens of notes; they end with the last whole draft that fits, or at
            the limit.
        learn: Roles whose rows are learned from; others make no rows. Compare drafts among themselves
            (`by: [group, role]`).
        shared: All answers to a prompt read the same notes.
        stop_early: End with a draft where all drafts of a round that have an answer agree, two at least, or
            where the only draft of a round repeats that of the round before; of drafts that agree the most
            likely is the answer, with the tag `role: draft`. In training this is not done: equal answers
            teach nothing.
        tag: Tag of the answer in a draft; empty: all that follows its thought.
        template: Text after the question, with `{workspace}`.
    """

    engine: ContinuingEngine
    _: KW_ONLY
    stream: Stream
    rounds: tuple[PositiveInt, ...] = (4,)
    distil: Literal["top_k", "random_k", "last", "summary"] = "top_k"
    keep: PositiveInt = 2
    max_workspace_tokens: PositiveInt = 512
    learn: tuple[Role, ...] = ("refine",)
    shared: bool = True
    stop_early: bool = False
    tag: str = ""
    template: str = WORKSPACE
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy
        if "{workspace}" not in self.template:
            raise ConfigError(f"'template' must contain {{workspace}}, not be {self.template!r}")
        if "refine" not in self.learn:
            raise ConfigError(
                f"`learn` of vision.with_drafts must name `refine`, whose rows are the answers, not "
                f"{list(self.learn)}"
            )

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry, in order; drafts that are learned from come after all answers."""
        train = self.stream.purpose == "train"
        counts = Counter(prompt.uid for prompt in prompts)
        attempts = []
        for uid, count in counts.items():
            prompt = next(prompt for prompt in prompts if prompt.uid == uid)
            shares = [count] if self.shared and train else [1] * count
            attempts += [
                Attempt(prompt, f"{self.stream.round}.{i}", answers) for i, answers in enumerate(shares)
            ]
        live = attempts
        for number, drafts in enumerate(self.rounds):
            self._ask(live, "draft", number, drafts)
            if self.stop_early and not train:
                live = [attempt for attempt in live if not self._agreed(attempt, number)]
            self._distil(live, number)
        self._ask(live, "refine", len(self.rounds), 0)
        answers: dict[str, list[Trajectory]] = defaultdict(list)
        others: list[Trajectory] = []
        for attempt in attempts:
            for role, number, row in attempt.rows:
                made = self._row(attempt, role, number, row)
                if role == "refine" or row is attempt.settled:
                    answers[attempt.prompt.uid].append(made)
                elif train and role in self.learn:
                    others.append(made)
        return (*(answers[prompt.uid].pop(0) for prompt in prompts), *others)

    def _ask(self, attempts: Sequence[Attempt], role: Role, number: int, drafts: int) -> None:
        """Let all attempts answer their question and notes so often; 0: as often as they have answers."""
        asked = []
        for attempt in attempts:
            text = self.template.replace("{workspace}", attempt.workspace) if attempt.workspace else ""
            asked += [attempt.asked(role, number, text)] * (drafts or attempt.answers)
        rows = iter(self.engine.rollout(asked) if asked else ())  # all may be settled
        for attempt in attempts:
            attempt.rows.extend((role, number, next(rows)) for _ in range(drafts or attempt.answers))

    def _agreed(self, attempt: Attempt, number: int) -> bool:
        """Return whether drafts agree, and choose one of them as the answer then."""
        earliest = number - (self.rounds[number] == 1)
        drafts = [row for role, at, row in attempt.rows if role == "draft" and earliest <= at <= number]
        known = [(row, text) for row in drafts if (text := self._answer(row))]
        if len(known) < 2 or len({exact_text(text) for _, text in known}) > 1:
            return False
        ranked = most_agreed([text for _, text in known], [_mean_logp(row) for row, _ in known])
        attempt.settled = known[ranked[0]][0]
        return True

    def _distil(self, attempts: Sequence[Attempt], number: int) -> None:
        """Make the notes of a round from its drafts."""
        asked: list[tuple[Attempt, Prompt]] = []
        for attempt in attempts:
            rows = [row for role, at, row in attempt.rows if role == "draft" and at == number]
            texts = [self._answer(row) for row in rows]
            known = [i for i, text in enumerate(texts) if text]
            match self.distil:
                case "last":
                    known = known[-1:]
                case "random_k":
                    name = (attempt.prompt.uid, attempt.name, number)
                    order = torch.randperm(len(known), generator=self.stream.generator("drafts", *name))
                    known = sorted(known[i] for i in order[: self.keep].tolist())
                case "top_k":
                    known = most_agreed(texts, [_mean_logp(row) for row in rows])[: self.keep]
            listed = [texts[i] for i in known]
            attempt.workspace = self._within(listed)
            if self.distil == "summary" and listed:
                shown = "\n".join(f"{i}. {text}" for i, text in enumerate(listed, 1))
                question = attempt.asked("distil", number, SUMMARY.replace("{drafts}", shown))
                asked.append((attempt, question))
        if asked:
            for (attempt, _), row in zip(
                asked, self.engine.rollout([prompt for _, prompt in asked]), strict=True
            ):
                attempt.rows.append(("distil", number, row))
                attempt.workspace = self._within([_plain(row)])

    def _answer(self, row: Trajectory) -> str:
        """Return the answer of a draft without its thought; empty if it has none."""
        if not self.tag:
            return _plain(row)
        blocks = tagged(row.outcomes[-1].text or "", self.tag)
        return MARKUP.sub("< ", blocks[-1]).strip() if blocks else ""

    def _within(self, texts: Sequence[str]) -> str:
        """Join texts within the limit of tokens: as many whole ones as fit, or a part of the first."""
        encoder = self.policy.prompt_encoder
        lines = [f"{i}. {text}" for i, text in enumerate(texts, 1)] if len(texts) > 1 else list(texts)
        for count in range(len(lines), 0, -1):
            joined = "\n".join(lines[:count])
            ids = encoder.plain.ids(joined)
            if len(ids) <= self.max_workspace_tokens:
                return joined
            if count == 1:
                return encoder.text(torch.tensor(ids[: self.max_workspace_tokens]))
        return ""

    def _row(self, attempt: Attempt, role: Role, number: int, row: Trajectory) -> Trajectory:
        """Make a call a row of the prompt, with tags and, for an answer, its budgets."""
        tags = {"role": role, "round": str(number), "workspace": f"{attempt.name}/{number}"}
        tags |= {CHANGED: "yes"} if row.prompt.messages != attempt.prompt.messages else {}
        recorded: Mapping[str, float] = {}
        if attempt.answers == 1 and len(self.learn) > 1 and self.stream.purpose == "train":
            # In the order of rounds; notes follow the drafts that they are made from.
            turn = 2 * number + (role == "distil")
            tags |= {"episode": attempt.name, "turn": str(turn)}
        if role == "refine" or row is attempt.settled:
            steps: dict[tuple[Role, int], list[tuple[int, int]]] = defaultdict(list)
            for kind, at, other in attempt.rows:
                steps[kind, at].append(_tokens(other))
            calls = list(steps.values())
            total, sequential = budgets(calls if attempt.settled else [*calls[:-1], [_tokens(row)]])
            recorded = {"tokens_total": float(total), "tokens_sequential": float(sequential)}
        outcomes = tuple(
            replace(outcome, tags={**outcome.tags, **tags}, recorded={**outcome.recorded, **recorded})
            for outcome in row.outcomes
        )
        return replace(row, prompt=attempt.prompt, group=attempt.prompt.uid, outcomes=outcomes)


def most_agreed(texts: Sequence[str], logp: Sequence[float]) -> list[int]:
    """Rank answers by how many are equal, then by mean log-probability, then by place.

    Case and space do not matter; empty answers are left out.
    """
    keys = list(map(exact_text, texts))
    sizes = Counter(keys)
    known = [i for i, key in enumerate(keys) if key]
    return sorted(known, key=lambda i: (-sizes[keys[i]], -logp[i], i))


def budgets(calls: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    """Count tokens: of all calls, and of the longest call of every parallel step.

    Args:
        calls: For every step its calls, each with its tokens in and out.
    """
    sums = [[sum(call) for call in step] for step in calls]
    return sum(map(sum, sums)), sum(max(step, default=0) for step in sums)


def _tokens(row: Trajectory) -> tuple[int, int]:
    return len(row.steps.prompt.ids), len(row.steps.ids)


def _mean_logp(row: Trajectory) -> float:
    return fmean(row.notes["logp"].tolist())


def _plain(row: Trajectory) -> str:
    """Return an answer without its thought and without markers of chat templates."""
    text = (row.outcomes[-1].text or "").rpartition("</think>")[2]
    return MARKUP.sub("< ", text).strip()
