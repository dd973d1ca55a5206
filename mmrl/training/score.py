"""Scoring of rollouts: call all rewards in parallel, check their results, build the reward table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.binding import Bound
from mmrl.core.chat import turns_of_outcomes
from mmrl.core.episodes import BARE, EPISODE, ORDER, TURN, turn_number
from mmrl.core.reward_table import ABSENT, RewardTable, name_id
from mmrl.core.types import Outcome, Rollouts, TrainerState
from mmrl.runtime.distributed import Processes
from mmrl.runtime.reward_calls import RewardFault, call_all, checked
from mmrl.runtime.scoring import Scoring


@dataclass
class RewardLog:
    """Metrics and completion columns that rewards log (`log_metric`, `log_extra`)."""

    state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)  # of the latest `score` call

    def add(self, call: Scoring) -> None:
        """Add the metrics and columns that one reward call logged."""
        for name, values in call.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        self.columns |= call.columns

    def take(self, processes: Processes, known: Collection[str] = ()) -> dict[str, float]:
        """Return the means of the metrics over all calls on all processes, and reset them.

        Raises `RewardFault` for a metric name in `known`, the names of the run's other metrics.
        """
        parts = processes.all_gather_object(
            {name: [math.fsum(values), len(values)] for name, values in self.metrics.items()}
        )
        self.metrics = {}
        totals: dict[str, list[float]] = {}
        for name, both in (item for part in parts for item in part.items()):
            totals[name] = [a + b for a, b in zip(totals.get(name, [0.0, 0]), both, strict=True)]
        if taken := sorted(totals.keys() & set(known)):
            raise RewardFault(
                f"log_metric('{taken[0]}', ...): the run has a metric of this name; take another"
            )
        return {name: total / count for name, (total, count) in totals.items()}

    def onto(self, rollouts: Rollouts) -> Rollouts:
        """Add the logged columns to the rollouts of the latest `score` call."""
        if not self.columns:
            return rollouts
        last, rows = -1, []
        for row in rollouts:
            last += len(row.outcomes)
            columns = {name: values[last] for name, values in self.columns.items()}
            rows.append(replace(row, logged={**row.logged, **columns}))
        self.columns = {}
        return tuple(rows)


def score(
    rewards: Sequence[Bound],
    rollouts: Rollouts,
    *,
    notes: frozenset[str] = frozenset(),
    rank: int = 0,
    log: RewardLog | None = None,
) -> RewardTable:
    """Score every outcome of rollouts with every reward.

    A failing reward raises `RewardFault`. With `on_error: skip`, the groups for which it fails are left out
    of statistics and learning instead.

    Args:
        rewards: The rewards.
        rollouts: The rollouts of this process.
        notes: Names of the engine's per-step records that advantage functions read.
        rank: Rank of this process.
        log: Collects the metrics and columns that rewards log.
    """
    if not rollouts:
        return RewardTable.empty().replace(rank=rank)
    prompts = [row.prompt for row in rollouts for _ in row.outcomes]
    outcomes = [outcome for row in rollouts for outcome in row.outcomes]
    before = _versions(outcomes)
    log = log or RewardLog()
    rows = [i for i, row in enumerate(rollouts) for _ in row.outcomes]
    turns = [talk for row in rollouts for talk in turns_of_outcomes(row)]
    scoring = Scoring(_tokens(rollouts), turns, rows, log.state)
    results = call_all(rewards, prompts, outcomes, final_turns(rollouts), scoring)
    log.columns = {}
    for result in results:
        log.add(result.logged)
    if _versions(outcomes) != before:
        raise RewardFault(
            f"one of the rewards {', '.join(bound.name for bound in rewards)} changed the pixels or times of "
            "outcomes in place, which all rewards and the report share; let it work on a copy"
        )
    columns, faults = {}, {}
    for bound, result in zip(rewards, results, strict=True):
        columns[bound.name], broken = checked(bound, result, prompts, outcomes)
        if broken:
            faults[bound.name] = broken
    table = _lay_out(rollouts, columns, {bound.name: bound.weight for bound in rewards}, notes, rank)
    if not faults:
        return table
    marks = {}
    for name, broken in faults.items():
        faulty = torch.zeros(len(outcomes), dtype=torch.int64)
        faulty[broken] = 1
        marks[f"fault/{name}"] = torch.zeros_like(table.ends).masked_scatter(table.present, faulty)
    # Exclude groups with a failed reward from statistics and learning.
    faulty_groups = table.group[torch.stack(list(marks.values())).any(0).any(-1)]
    sound = ~torch.isin(table.group, faulty_groups)
    return table.replace(
        ids={**table.ids, **marks},
        valid=table.valid & sound[:, None, None],
        learn=table.learn & sound[:, None],
    )


def _versions(outcomes: Sequence[Outcome]) -> list[int]:
    """List the version counters of the outcomes' tensors, to detect rewards that write in place."""
    tensors = [t for outcome in outcomes for t in (outcome.image, outcome.video, outcome.times)]
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def _tokens(rollouts: Rollouts) -> list[list[int] | None]:
    """List the token ids of every outcome; if it has none, the ids that the engine recorded."""

    def of_outcome(outcome: Outcome, noted: Tensor | None) -> list[int] | None:
        if outcome.tokens is not None:
            return list(outcome.tokens)
        return None if noted is None else noted[: outcome.end].tolist()

    return [of_outcome(outcome, row.notes.get("token")) for row in rollouts for outcome in row.outcomes]


def final_turns(rollouts: Rollouts) -> list[bool]:
    """Whether each outcome is the last turn of its conversation, or a plain answer (no tag `turn`).

    It is False for outcomes with the tag `bare`, which only rewards with `at: every` score.
    """
    last: dict[tuple[str, str], int] = {}  # maps every episode to the number of its last turn
    for row in rollouts:
        tags = row.outcomes[-1].tags
        if EPISODE in tags:
            key = (row.group, tags[EPISODE])
            last[key] = max(last.get(key, 0), turn_number(tags))
    final = []
    for row in rollouts:
        tags = row.outcomes[-1].tags
        ends = EPISODE not in tags or turn_number(tags) == last[row.group, tags[EPISODE]]
        final += [not {TURN, BARE} & outcome.tags.keys() for outcome in row.outcomes[:-1]] + [ends]
    return final


# ---- the reward table


def _lay_out(
    rollouts: Rollouts,
    columns: Mapping[str, Tensor],
    weights: Mapping[str, float],
    notes: frozenset[str],
    rank: int,
) -> RewardTable:
    """Build the reward table from scores: values, outcome ends and ids, and per-step records."""
    ends = []
    for row in rollouts:
        ends.append([row.length if outcome.end is None else outcome.end for outcome in row.outcomes])
        if ends[-1] != sorted(ends[-1]):
            raise ValueError(
                f"outcomes of prompt '{row.prompt.uid}' must be in order, but their ends are {ends[-1]}"
            )
    ends = _padded(ends, ABSENT)
    present, shape = ends != ABSENT, ends.shape  # (rollouts, outcomes)
    scored = {
        name: torch.full(shape, math.nan, dtype=torch.float64).masked_scatter(present, values)
        for name, values in columns.items()
    }
    weights = {name: weight for name, weight in weights.items() if weight != 0}  # labels have weight 0
    nothing = torch.zeros((len(rollouts), 0, shape[1]), dtype=torch.float64)  # if all weights are 0
    values = torch.stack([scored[name] for name in weights], 1) if weights else nothing
    ids = {
        "group": [name_id(row.group) for row in rollouts],  # a hash, equal in all rounds and processes
        "row": list(range(shape[0])),
        "on_policy": [int(row.on_policy) for row in rollouts],
    }
    tagged = [[{**row.prompt.tags, **outcome.tags} for outcome in row.outcomes] for row in rollouts]
    tags = {
        tag: _padded([[name_id(tags.get(tag, "")) for tags in row] for row in tagged])
        for tag in sorted({tag for row in tagged for tags in row for tag in tags})
    }
    if TURN in tags:
        tags[ORDER] = _padded([[turn_number(of_turn) for of_turn in row] for row in tagged])
    return RewardTable(
        values=values.nan_to_num(),
        valid=~values.isnan() & present[:, None],
        weights=weights,
        scored=scored,
        ends=ends,
        ids={
            **{name: torch.tensor(column)[:, None].expand(shape) for name, column in ids.items()},
            "place": torch.arange(shape[1]).expand(shape),
            "text": _padded(
                [[int(outcome.text is not None) for outcome in row.outcomes] for row in rollouts]
            ),
            **tags,
        },
        notes=_notes(rollouts, notes),
        length=torch.tensor([row.length for row in rollouts]),
        learn=present,
        uids=tuple(row.prompt.uid for row in rollouts),
        process=torch.full(shape[:1], rank),
        rank=rank,
    )


def _padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    """Pad lists of integers to one tensor (rows, longest)."""
    columns = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(columns, batch_first=True, padding_value=fill)


def _notes(rollouts: Rollouts, names: frozenset[str]) -> dict[str, Tensor]:
    """Pad the engine's per-step records to (rollouts, steps), with NaN for missing records.

    If `logp` has a NaN, it is included too: NaN marks steps that the policy did not choose.
    """
    steps = max(row.length for row in rollouts)
    if any(row.notes["logp"].isnan().any() for row in rollouts if "logp" in row.notes):
        names = names | {"logp"}
    notes = {}
    for name in sorted(names):
        notes[name] = torch.full((len(rollouts), steps), math.nan, dtype=torch.float64)
        for i, row in enumerate(rollouts):
            if name in row.notes:
                notes[name][i, : row.length] = row.notes[name].double()
    return notes
