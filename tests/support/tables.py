"""Comparing tables with numbers, and the step tables of worked examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.from_numbers import ListedSteps, padded, reward_table, step_table
from mmrl.core.reward_table import NAN, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch, StepOutput

__all__ = ["NAN", "ListedSteps", "padded", "reward_table", "step_table"]  # used from here by many tests

TOLERANCE = 2e-6  # of the worked numbers, which are printed with six digits


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


def prefix_rewards(*rows: Sequence[float]) -> RewardTable:
    """Build a table of one reward measured after 0, 1, ..., T steps of every row."""
    return reward_table(rows, ends=[range(len(row)) for row in rows])


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
