"""Construction of reward tables and step tables from plain numbers, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.episodes import ORDER, TURN, turn_number
from mmrl.core.reward_table import ABSENT, NAN, RewardTable, name_id
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit


def padded(rows: Sequence[Sequence[float | None]], fill: float = 0.0) -> Tensor:
    """Pad ragged rows to (N, longest) float64; None becomes NaN."""
    width = max((len(row) for row in rows), default=0)
    table = torch.full((len(rows), width), fill, dtype=torch.float64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(
            [NAN if value is None else value for value in row], dtype=torch.float64
        )
    return table


def reward_table(
    rewards: Mapping[str, Sequence] | Sequence,
    *,
    group: Sequence[str | int] = (),
    weights: Mapping[str, float] | None = None,
    length: Sequence[int] = (),
    ends: Sequence[Sequence[int]] = (),
    on_policy: Sequence[bool] = (),
    tags: Mapping[str, Sequence] | None = None,
    notes: Mapping[str, Sequence] | None = None,
    process: Sequence[int] = (),
) -> RewardTable:
    """Create a reward table from a mapping of rewards, or from the values of one reward called "reward".

    `reward_table([1, 0, 0, 1])` is a group of four answers. Every other argument has one entry per row.

    Args:
        rewards: One entry per row: a number, or a list with one number per outcome; None: does not apply.
        group: Name of each row's group; rows of a group are compared. By default all rows are one group.
        weights: Weight of each reward in a sum, by default 1; a reward of weight 0 is only a label.
        length: Number of steps of each row. By default its number of outcomes.
        ends: Number of steps up to the end of each outcome. By default outcomes end at the last steps.
        on_policy: Whether the row was sampled from the policy. By default all rows are.
        tags: Maps a tag to one entry per row: a text, or a list with one text per outcome.
        notes: Maps the name of a recorded quantity to one list per row, with one value per step.
        process: Rank of the process that has the rollout, by default 0.

    Raises:
        ValueError: Rewards, or other columns, have different numbers of rows.
    """
    named = dict(rewards) if isinstance(rewards, Mapping) else {"reward": rewards}
    rows = {name: [_listed(row) for row in column] for name, column in named.items()}
    counts = [len(row) for row in next(iter(rows.values()))]
    columns = {"group": group, "length": length, "ends": ends, "on_policy": on_policy, "process": process}
    tags, notes = tags or {}, notes or {}
    given = [pair for pair in (*tags.items(), *notes.items(), *columns.items()) if len(pair[1])]
    _check_rows([*rows.items(), *given], len(counts))
    weights = {name: 1.0 for name in rows} | dict(weights or {})
    group = [str(name) for name in group] or ["a"] * len(counts)
    steps = list(length) or [row[-1] for row in ends] or counts
    ends = list(ends) or [range(n - k + 1, n + 1) for n, k in zip(steps, counts, strict=True)]
    stands = padded(ends, ABSENT).long()
    present = stands != ABSENT
    scored = {name: torch.where(present, padded(column, NAN), NAN) for name, column in rows.items()}
    learned = tuple(name for name in rows if weights[name])
    values = torch.stack([scored[name] for name in learned], 1)
    return RewardTable(
        values=values.nan_to_num(),
        valid=~values.isnan(),
        weights={name: weights[name] for name in learned},
        scored=scored,
        ends=stands,
        ids=_ids(stands.shape, group, on_policy) | _tag_ids(tags, counts, stands.shape),
        notes={name: padded(note, NAN) for name, note in notes.items()},
        length=torch.tensor(steps),
        learn=present,
        uids=tuple(group),
        process=torch.tensor(list(process) or [0] * len(counts)),
    )


def _ids(shape: torch.Size, group: Sequence[str], on_policy: Sequence[bool]) -> dict[str, Tensor]:
    """Create the ids `group`, `row`, `on_policy` and `place` (outcome index) of a table: (N, K) each."""
    numbers = {
        "group": [name_id(name) for name in group],
        "row": list(range(len(group))),
        "on_policy": [int(sampled) for sampled in on_policy] or [1] * len(group),
    }
    columns = {name: torch.tensor(listed)[:, None].expand(shape) for name, listed in numbers.items()}
    return columns | {"place": torch.arange(shape[1]).expand(shape)}


def _tag_ids(tags: Mapping[str, Sequence], counts: Sequence[int], shape: torch.Size) -> dict[str, Tensor]:
    """Hash the texts of every tag to ids (N, K); a single text in a row applies to all its outcomes."""
    ids = {}
    for name, words in tags.items():
        numbers = [[name_id(word) for word in _listed(row)] for row in words]
        ids[name] = padded_ids(
            [row * k if len(row) == 1 else row for row, k in zip(numbers, counts, strict=True)]
        )
        if name == TURN:
            turns = padded_ids([[turn_number({TURN: word}) for word in _listed(row)] for row in words])
            ids[ORDER] = turns.expand(shape)
    return ids


def padded_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    """Pad ragged rows of 63-bit ids with 0, as integers, since floats would round them."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def _check_rows(columns: Sequence[tuple[str, Sequence]], count: int) -> None:
    for name, column in columns:
        if len(column) != count:
            raise ValueError(f"'{name}' has {len(column)} rows, and the first reward {count}")


def _listed(row: Any) -> list:
    return list(row) if isinstance(row, Sequence) and not isinstance(row, str) else [row]


# ---- step tables


@dataclass
class ListedSteps:
    """A stand-in for model inputs with row and step indices. A group shares a prompt of `prompt` steps."""

    rows: Tensor  # (N,)
    columns: Tensor  # (T,)
    group: Tensor  # (N,)
    unit: Unit = Unit.STEP
    prompt: int = 0

    def cost(self, rows: Tensor) -> int:
        return len(rows) * len(self.columns) + self.prompt * len(self.group[rows].unique())

    def __getitem__(self, cut: tuple[Tensor, slice]) -> ListedSteps:
        rows, columns = cut
        return ListedSteps(self.rows[rows], self.columns[columns], self.group[rows], self.unit, self.prompt)


def step_table(
    logp: Sequence[Sequence[float]],
    *,
    advantage: Sequence = (),
    group: Sequence[int] = (),
    mask: Sequence[Sequence[float]] | None = None,
    notes: Mapping[str, Sequence] | None = None,
    extra: Mapping[str, Sequence] | None = None,
    unit: Unit = Unit.STEP,
    prompt: int = 0,
    **others: Sequence[Sequence[float]],
) -> tuple[StepOutput, Batch]:
    """Create a batch and the policy's output for it from ragged rows of log-probabilities, in float64.

    `output, batch = step_table([[-0.5, -1.0], [-2.0]], advantage=[1.0, -1.0])`. `batch.totals` are counted
    from the batch; `output.logp` requires a gradient.

    Args:
        logp: Log-probability of every step of every row.
        advantage: One entry per row: a number, or a list with one number per step.
        group: Number of each row's group; by default all rows are one group.
        mask: 0 where a step is not learned from; holes inside a row are allowed.
        notes: Maps a name to values per step, as an engine records them.
        extra: Further outputs of the policy by name, such as "entropy".
        unit: The smallest part of the batch that can be computed alone.
        prompt: Cost of a prompt in steps, counted once per group of a micro-batch.
        others: Log-probabilities of other policies: `old=`, `ref=`, `engine=`.
    """
    counted = padded([[1.0] * len(row) for row in logp] if mask is None else mask)
    names = torch.tensor(list(group) or [0] * len(logp))
    steps = ListedSteps(torch.arange(len(logp)), torch.arange(counted.shape[1]), names, unit, prompt)
    batch = Batch.of(steps, counted, {name: padded(note, NAN) for name, note in (notes or {}).items()})
    advantages = torch.zeros_like(counted)
    for i, value in enumerate(advantage):
        row = _listed(value)
        advantages[i, : len(logp[i])] = torch.tensor(row, dtype=torch.float64)
    batch = batch.replace(
        group=names,
        advantage=advantages * counted,
        others={name: StepOutput(padded(rows)) for name, rows in others.items()},
    )
    output = StepOutput(
        padded(logp).requires_grad_(), {name: padded(value) for name, value in (extra or {}).items()}
    )
    return output, batch.replace(totals=batch.count())
