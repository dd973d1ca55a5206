"""Builders of reward tables and step tables from nested lists, ragged ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.reward_table import ABSENT, RewardTable, name_id
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit

NAN = float("nan")
TOLERANCE = 2e-6  # of the worked numbers, which are printed with six digits


def padded(rows: Sequence[Sequence[float | None]], fill: float = 0.0) -> Tensor:
    """Lay ragged rows out as (N, longest) float64; None is NaN."""
    width = max((len(row) for row in rows), default=0)
    table = torch.full((len(rows), width), fill, dtype=torch.float64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(
            [NAN if value is None else value for value in row], dtype=torch.float64
        )
    return table


def assert_rows(actual: Tensor, wanted: Sequence, tolerance: float = TOLERANCE) -> None:
    """Compare (N, ...) numbers with nested lists; a row of the list may be shorter, what is behind it is
    padding."""
    assert len(actual) == len(wanted)
    for i, (row, numbers) in enumerate(zip(actual.detach().double(), wanted, strict=True)):
        numbers = torch.tensor(numbers, dtype=torch.float64)
        here = row[: len(numbers)] if numbers.dim() else row.reshape(-1)[0]
        assert numbers.dim() or row.numel() == 1, f"row {i} holds {row.numel()} numbers, not one"
        torch.testing.assert_close(
            here, numbers, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m, i=i: f"row {i}: {m}"
        )


# ---- reward tables


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
    """Build a table from rewards by name, or from one reward called "reward".

    A row of a reward is a number, or a list with one number per outcome; None where the reward does not
    apply. Rows of one `group` (by default all of them) are compared. Without `ends` the outcomes of a row
    stand at its last steps, without `length` every outcome stands behind one step. A weight of 0 makes a
    label.
    """
    named = dict(rewards) if isinstance(rewards, Mapping) else {"reward": rewards}
    rows = {name: [_listed(row) for row in column] for name, column in named.items()}
    counts = [len(row) for row in next(iter(rows.values()))]
    weights = {name: 1.0 for name in rows} | dict(weights or {})
    steps = list(length) or [row[-1] for row in ends] or counts
    ends = list(ends) or [range(n - k + 1, n + 1) for n, k in zip(steps, counts, strict=True)]
    stands = padded(ends, ABSENT).long()
    present = stands != ABSENT
    scored = {name: torch.where(present, padded(column, NAN), NAN) for name, column in rows.items()}
    learned = tuple(name for name in rows if weights[name])
    values = torch.stack([scored[name] for name in learned], 1)
    shape = stands.shape

    def column(of_rows: Sequence[int]) -> Tensor:
        return torch.tensor(list(of_rows))[:, None].expand(shape)

    ids = {
        "group": column(name_id(str(name)) for name in group or "a" * len(counts)),
        "row": column(range(len(counts))),
        "place": torch.arange(shape[1]).expand(shape),
        "on_policy": column(int(sampled) for sampled in on_policy or [True] * len(counts)),
    }
    for name, words in (tags or {}).items():
        numbers = [[name_id(word) for word in _listed(row)] for row in words]
        ids[name] = padded_ids(
            [row * k if len(row) == 1 else row for row, k in zip(numbers, counts, strict=True)]
        )
    return RewardTable(
        values=values.nan_to_num(),
        valid=~values.isnan(),
        weights={name: weights[name] for name in learned},
        scored=scored,
        ends=stands,
        ids=ids,
        notes={name: padded(note, NAN) for name, note in (notes or {}).items()},
        length=torch.tensor(steps),
        learn=present,
        uids=tuple(str(name) for name in group or "a" * len(counts)),
        process=torch.tensor(list(process) or [0] * len(counts)),
    )


def prefix_rewards(*rows: Sequence[float]) -> RewardTable:
    """Build a table of one reward measured after 0, 1, ..., T steps of every row."""
    return reward_table(rows, ends=[range(len(row)) for row in rows])


def padded_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    """Lay ragged rows of 63-bit names out; 0 behind them. A float would round them."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def _listed(row: Any) -> list:
    return list(row) if isinstance(row, Sequence) and not isinstance(row, str) else [row]


# ---- step tables


@dataclass(frozen=True)
class ListedSteps:
    """Steps that know which they are. Rows of one group share a prompt of `prompt` steps."""

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
    """Build what a policy says and its batch from ragged rows of log-probabilities, in float64.

    An advantage is a number per row or per step. Further keywords are what other policies say (`old=`,
    `ref=`, `engine=`). Totals are those of the batch; gradients reach `logp`.
    """
    counted = padded([[1.0] * len(row) for row in logp] if mask is None else mask)
    names = torch.tensor(list(group) or [0] * len(logp))
    steps = ListedSteps(torch.arange(len(logp)), torch.arange(counted.shape[1]), names, unit, prompt)
    batch = Batch.of(steps, counted, {name: padded(note, NAN) for name, note in (notes or {}).items()})
    laid = torch.zeros_like(counted)
    for i, value in enumerate(advantage):
        row = _listed(value)
        laid[i, : len(logp[i])] = torch.tensor(row, dtype=torch.float64)
    batch = batch.replace(
        group=names,
        advantage=laid * counted,
        others={name: StepOutput(padded(said)) for name, said in others.items()},
    )
    said = StepOutput(
        padded(logp).requires_grad_(), {name: padded(value) for name, value in (extra or {}).items()}
    )
    return said, batch.replace(totals=batch.count())


def moved(
    gap: Sequence[Sequence[float]], advantage: Sequence, logp: Sequence[Sequence[float]] | None = None
) -> tuple[StepOutput, Batch]:
    """Build a step table from log-ratios to `old`; log-probabilities are -1 unless given."""
    new = logp or [[-1.0] * len(row) for row in gap]
    old = [[a - b for a, b in zip(row, gaps, strict=True)] for row, gaps in zip(new, gap, strict=True)]
    return step_table(new, advantage=advantage, old=old)


def micro_batch() -> tuple[StepOutput, Batch]:
    """Build the two rows that the worked numbers of the losses share: three steps of advantage 1, two of
    -1/2."""
    return moved([[0.1, -0.2, 0.3], [-0.4, 0.05]], [1.0, -0.5], [[-0.5, -1.0, -0.2], [-2.0, -0.7]])


def objective_of(**pieces: Any):
    """Make a policy gradient from the names of its pieces, as a config does."""
    return Pieces(Stream()).make("objective", Piece("policy_gradient", pieces))


def loss_of(new: StepOutput, batch: Batch, **pieces: Any) -> Tensor:
    """Give the loss of a batch as one update has it."""
    objective = objective_of(**pieces)
    return objective(new, batch.replace(weight=objective.weigh(batch)))[0]


def slope_of(loss: Tensor, new: StepOutput) -> Tensor:
    """Differentiate a loss (its sum, where it is a table) by the log-probability of every step: (N, T)."""
    return torch.autograd.grad(loss.sum(), new.logp)[0]
