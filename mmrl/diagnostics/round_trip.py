"""Checks that a row's target, as the answer, gets full marks for this row but not for other rows."""

from __future__ import annotations

import contextvars
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config.binding import Bound, Pieces
from mmrl.config.loading import ConfigError
from mmrl.config.registry import leaves_form
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer
from mmrl.rewards.answers import FormOfData
from mmrl.runtime.reward_calls import matches
from mmrl.runtime.scoring import Scoring, called, shown, to_float

SAMPLE = 200  # number of rows to check when a run starts
WRONG_SHARE = 0.05  # maximum fraction of rows whose own target gets less than full marks
ALIKE_SHARE = 0.5  # maximum fraction of rows in which targets of other rows get full marks
OTHERS = 3  # number of targets of other rows to try as answers to a row
NEAR = 1e-6  # tolerance for rounding
SHOWN = 3  # number of rows to name in a message
SECONDS = 60.0  # timeout of an asynchronous reward


@dataclass(frozen=True)
class RoundTrip:
    """Result of checking whether one reward accepts the targets of the data as answers.

    Args:
        place: Configuration key and name of the reward.
        rows: Number of rows with a target that the reward reads.
        wrong: A sentence for each row whose own target does not get full marks.
        alike: A sentence for each row in which all tried targets of other rows get full marks.
        compared: Maximum number of targets of other rows that were tried for a row.
        unfit: A sentence for each row whose target has another form than the reward reads.
        where: The reward's option `where` if no row of the data matches it, else None.
    """

    place: str
    rows: int
    wrong: Sequence[str]
    alike: Sequence[str]
    compared: int
    unfit: Sequence[str] = ()
    where: Mapping[str, Any] | None = None

    def lines(self) -> Iterator[str]:
        """Yield sentences about the faults; each names the first faulty rows."""
        if self.where:
            yield f"{self.place}: no row has {dict(self.where)} (`where`), so it gives no reward"
        elif not self.rows:
            yield (
                f"{self.place}: no row has a target that it reads, so it gives no reward; name the column of "
                "the target (`columns` of the data); a recorded answer, as `messages` end with, is none"
            )
        for faults, what in (
            (self.wrong, "do not give full marks to their own target as the answer"),
            (self.alike, "give full marks to the targets of other rows as well"),
            (self.unfit, "have a target of another form, which is compared by its words"),
        ):
            if faults:
                more = f"; and {len(faults) - SHOWN:,} more" if len(faults) > SHOWN else ""
                shown_rows = "; ".join(faults[:SHOWN]) + more
                yield f"{self.place}: {len(faults):,} of {self.rows:,} rows {what}: {shown_rows}"

    @property
    def fails(self) -> bool:
        """Whether too many rows are faulty, so that the run must not train."""
        wrong = len(self.wrong) > WRONG_SHARE * self.rows
        return wrong or (self.compared > 1 and len(self.alike) > ALIKE_SHARE * self.rows)


def check_targets(
    prompts: Sequence[Prompt],
    rewards: Sequence[Piece],
    place: str,
    *,
    sample: int = 0,
    form: FormOfData | None = None,
) -> list[str]:
    """Check each reward that reads targets; return sentences about the rows in which the check fails.

    Rewards that need a missing package or another process are skipped.

    Args:
        prompts: The data.
        rewards: Pieces of the rewards.
        place: Configuration key of the rewards, such as `rewards`.
        sample: Number of rows to check, evenly spaced; 0: all rows.
        form: Answer form of the targets, if it was inferred before.

    Raises:
        ConfigError: The target does not get full marks in more than 5 % of the rows, or targets of other
            rows get full marks in more than half of the rows.
    """
    trips = list(round_trips(prompts, rewards, place, sample=sample, form=form))
    if not all(trip.where for trip in trips) or len(trips) < len(rewards):
        trips = [trip for trip in trips if not trip.where]  # no fault, as other rewards score the rows
    if failed := [line for trip in trips if trip.fails for line in trip.lines()]:
        raise ConfigError(
            "; ".join(failed) + ". Nothing right is learned from such rows: mend their targets, or choose "
            "the reward, its options or the column of the target so that it reads them"
        )
    return [line for trip in trips for line in trip.lines()]


def round_trips(
    prompts: Sequence[Prompt],
    rewards: Sequence[Piece],
    place: str,
    *,
    sample: int = 0,
    form: FormOfData | None = None,
) -> Iterator[RoundTrip]:
    """Yield the check result of every reward for which targets can be written as right answers."""
    pieces, form = Pieces(Stream()), form or FormOfData(prompts)
    rows: Sequence[Prompt] = ()
    for i, piece in enumerate(rewards if len(prompts) else ()):
        bound = pieces.name("reward", piece, f"{place}[{i}]")
        where = bound.call.get("where")
        if where and not any(matches(row, where) for row in prompts):
            yield RoundTrip(f"{place}[{i}] '{bound.name}'", 0, (), (), 0, where=where)
            continue
        if not bound.entry.own_answer or "workers" in bound.call or not _installed(bound):
            continue
        if inspect.isclass(bound.entry.target) and not hasattr(bound.entry.target, "grade_texts"):
            continue  # do not construct it: it may load a model
        if leaves_form(bound.entry, bound.options):
            bound.options["form"] = form()
        rows = rows or sampled(prompts, sample)
        if where and not any(matches(row, where) for row in rows):
            continue  # no matching row in the sample
        yield round_trip(bound, rows, f"{place}[{i}] '{bound.name}'")


def sampled(prompts: Sequence[Prompt], sample: int) -> list[Prompt]:
    """Select up to `sample` prompts, evenly spaced; 0: all."""
    step = max(1.0, len(prompts) / sample) if sample else 1.0
    return [prompts[int(at * step)] for at in range(int(len(prompts) / step))]


def _installed(bound: Bound) -> bool:
    packages = bound.entry.given(bound.options).packages
    return all(importlib.util.find_spec(package) for package in packages)


def round_trip(bound: Bound, prompts: Sequence[Prompt], place: str) -> RoundTrip:
    """Grade the target of each row as the answer to its own row and to other rows."""
    grader = Grader(bound)
    where = bound.call.get("where")
    rows, wrong = [], []
    for prompt in prompts:
        if where and not matches(prompt, where):
            continue
        try:
            if own := grader.own(prompt):
                rows.append((prompt, own))
        except Exception as error:  # the target cannot be written as an answer
            rows.append((prompt, OwnAnswer(())))
            wrong.append(f"row '{prompt.uid}': {error}")
    pairs = [(prompt, text) for prompt, own in rows for text in own.texts]
    owners = [(prompt, own) for prompt, own in rows for _ in own.texts]
    bad: dict[str, str] = {}
    silent: set[str] = set()  # rows to which the reward does not apply
    for (prompt, text), (_, own), marks in zip(pairs, owners, grader.marks(pairs), strict=True):
        if marks is None:
            silent.add(prompt.uid)
        elif not isinstance(marks, float):
            bad.setdefault(prompt.uid, f"row '{prompt.uid}': {shown(text)} raises {marks!r}")
        elif not marks >= own.full - NEAR:
            bad.setdefault(prompt.uid, f"row '{prompt.uid}': {shown(text)} earns {marks:g} of {own.full:g}")
    rows = [(prompt, own) for prompt, own in rows if prompt.uid not in silent]
    sound = [(prompt, own) for prompt, own in rows if own.texts and prompt.uid not in bad]
    alike, compared = _alike(grader, sound)
    unfit = [f"row '{prompt.uid}': {own.unfit}" for prompt, own in rows if own.unfit]
    return RoundTrip(place, len(rows), [*wrong, *bad.values()], alike, compared, unfit)


def _alike(grader: Grader, rows: Sequence[tuple[Prompt, OwnAnswer]]) -> tuple[list[str], int]:
    """Return sentences on rows where all tried targets of other rows get full marks, and the number tried."""
    # Sort the targets so that similar ones, such as 3 and -3, are neighbours.
    texts = {_key(own.texts[0]): own.texts[0] for _, own in rows}
    order = sorted(texts, key=lambda key: ("".join(filter(str.isalnum, key)), key))
    place = {key: i for i, key in enumerate(order)}
    count = len(order)
    apart = list(dict.fromkeys(by for by in (1, count // 3, 2 * count // 3) if 0 < by < count))[:OTHERS]
    for by in range(2, min(count, OTHERS + 1)):  # with few targets, try all others
        apart += [by] if by not in apart and len(apart) < OTHERS else []
    left, first = list(rows), {}
    for by in apart:
        others = [texts[order[(place[_key(own.texts[0])] + by) % count]] for _, own in left]
        given = [(prompt, text) for (prompt, _), text in zip(left, others, strict=True)]
        paid = []
        for row, text, marks in zip(left, others, grader.marks(given), strict=True):
            prompt, own = row
            same = _key(text) in map(_key, own.texts)
            if not same and isinstance(marks, float) and marks >= own.full - NEAR:
                paid.append(row)
                first.setdefault(prompt.uid, f"row '{prompt.uid}': {shown(own.texts[0])} and {shown(text)}")
        left = paid
    return [first[prompt.uid] for prompt, _ in left] if apart else [], len(apart)


def _key(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class Grader:
    """Scorer of answers with one reward, outside of a run and without a model."""

    bound: Bound

    @property
    def options(self) -> Mapping[str, Any]:
        """Values of all options, with defaults; a scheduled option has its first value."""
        defaults = {name: option.default for name, option in self.bound.entry.options.items()}
        given = defaults | self.bound.options
        return {name: getattr(value, "first", value) for name, value in given.items()}

    def own(self, prompt: Prompt) -> OwnAnswer | None:
        """Return a prompt's target, written as a right answer; None if the reward cannot read the target."""
        return self._with_options(self.bound.entry.own_answer, prompt)

    def _with_options(self, function: Any, *arguments: Any) -> Any:
        takes, options = inspect.signature(function).parameters, self.options
        return function(*arguments, **{name: options[name] for name in takes if name in options})

    def _called(self, pairs: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        target = self.bound.entry.target
        function = getattr(target, "grade_texts", target)

        def reward(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> Any:
            if function is target:
                return function(
                    prompts, outcomes, **{name: self.options[name] for name in self.bound.options}
                )
            return self._with_options(function, prompts, outcomes)

        prompts = [prompt for prompt, _ in pairs]
        outcomes = [Outcome(text=text) for _, text in pairs]
        scoring = Scoring([None] * len(pairs))
        values = contextvars.copy_context().run(called, reward, prompts, outcomes, scoring, SECONDS)
        return [None if value is None else to_float(value) for value in values]

    def marks(self, pairs: Sequence[tuple[Prompt, str]]) -> list[float | Exception | None]:
        """Return the reward of each answer, None if the reward does not apply, or the error it raises."""
        try:
            return list(self._called(pairs)) if pairs else []
        except Exception as error:  # one answer raises, so grade them one by one
            return [error] if len(pairs) == 1 else [self.marks([pair])[0] for pair in pairs]
