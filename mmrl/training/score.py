"""Scores rollouts: calls all rewards at the same time, checks what they return, makes a reward table."""

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
    """What rewards log of their own: metrics, and columns of the completions that are written."""

    state: TrainerState = TrainerState()
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)  # of the rollouts that were scored last

    def add(self, call: Scoring) -> None:
        """Add what one call of a reward logged."""
        for name, values in call.metrics.items():
            self.metrics.setdefault(name, []).extend(values)
        self.columns |= call.columns

    def take(self, processes: Processes, known: Collection[str] = ()) -> dict[str, float]:
        """Return the means of the metrics over all calls on all processes, and begin anew.

        Raises RewardFault for a name that is `known` as another metric.
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
        """Give the rollouts that were scored last the columns of their last outcomes."""
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
    """Measure every outcome of rollouts with every reward.

    `notes` names the engine's notes that the advantage chain reads, `rank` is this process, and `log` takes
    what rewards log. A reward that fails stops the run with `RewardFault`; with `on_error: skip` the whole
    group is left out of statistics and learning.
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
    # A group with a faulty outcome counts in no statistics and is not learned from.
    faulty_groups = table.group[torch.stack(list(marks.values())).any(0).any(-1)]
    sound = ~torch.isin(table.group, faulty_groups)
    return table.replace(
        ids={**table.ids, **marks},
        valid=table.valid & sound[:, None, None],
        learn=table.learn & sound[:, None],
    )


def _versions(outcomes: Sequence[Outcome]) -> list[int]:
    """List the version counters of the tensors of outcomes, which grow when one is changed in place."""
    tensors = [t for outcome in outcomes for t in (outcome.image, outcome.video, outcome.times)]
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def _tokens(rollouts: Rollouts) -> list[list[int] | None]:
    """List the tokens of every outcome: its own, or those that the engine noted of its steps."""

    def of_outcome(outcome: Outcome, noted: Tensor | None) -> list[int] | None:
        if outcome.tokens is not None:
            return list(outcome.tokens)
        return None if noted is None else noted[: outcome.end].tolist()

    return [of_outcome(outcome, row.notes.get("token")) for row in rollouts for outcome in row.outcomes]


def final_turns(rollouts: Rollouts) -> list[bool]:
    """Tell which outcomes end their conversation; one without the tag `turn` is no part of one.

    Outcomes with the tag `bare` do not.
    """
    last: dict[tuple[str, str], int] = {}  # number of the last turn of every episode
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


# ---- the table


def _lay_out(
    rollouts: Rollouts,
    columns: Mapping[str, Tensor],
    weights: Mapping[str, float],
    notes: frozenset[str],
    rank: int,
) -> RewardTable:
    """Make the table of measured rewards, with the ends and ids of outcomes and the notes of steps."""
    ends = []
    for row in rollouts:
        ends.append([row.length if outcome.end is None else outcome.end for outcome in row.outcomes])
        if ends[-1] != sorted(ends[-1]):
            raise ValueError(
                f"outcomes of prompt '{row.prompt.uid}' must be in order, but their ends are {ends[-1]}"
            )
    ends = _padded(ends, ABSENT)
    present, shape = ends != ABSENT, ends.shape  # (N, K)
    scored = {
        name: torch.full(shape, math.nan, dtype=torch.float64).masked_scatter(present, values)
        for name, values in columns.items()
    }
    weights = {name: weight for name, weight in weights.items() if weight != 0}  # without labels
    nothing = torch.zeros((len(rollouts), 0, shape[1]), dtype=torch.float64)  # labels only
    values = torch.stack([scored[name] for name in weights], 1) if weights else nothing
    ids = {
        "group": [name_id(row.group) for row in rollouts],  # equal in every round and process
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
            "text": _padded([[int(made.text is not None) for made in row.outcomes] for row in rollouts]),
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
    """Make a table (N, K) of whole numbers from rows of different lengths."""
    columns = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(columns, batch_first=True, padding_value=fill)


def _notes(rollouts: Rollouts, names: frozenset[str]) -> dict[str, Tensor]:
    """Pad the engine's notes on every step to (N, T), NaN where there are none.

    Where the policy did not choose every step of a row, `logp` is among them: it tells which.
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
