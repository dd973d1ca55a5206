"""The pieces of a training method, made from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.config.schema import ConfigError
from mmrl.core.protocols import Engine, Policy, Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.references import Reference


@dataclass
class Method:
    """The pieces of a training method: what samples, what is rewarded, and what is learned from it."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    references: Mapping[str, Reference]
    sampler: Sampler
    engine: Engine
    rewards: Sequence[Bound]
    group_filter: Bound
    chain: Sequence[Bound]  # of the advantage
    objective: Any
    learning_rate: Bound | float
    noted: frozenset[str] = frozenset()  # notes of the engine that the chain, samplers and engines read

    @property
    def needs(self) -> Needs:
        """What the objective reads."""
        return self.objective.needs

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [parameter for parameter in self.policy.module.parameters() if parameter.requires_grad]


# ---- the advantage chain: functions that turn a table of rewards into a table of advantages


class ChainError(ValueError):
    """A piece of the advantage chain raised an exception, or returned no table or non-finite values."""


def through_chain(chain: Sequence[Bound], table: RewardTable, step: int) -> RewardTable:
    """Apply the pieces of a chain to a reward table, in order.

    Raises `ChainError` with the name of the first piece that fails, returns something else than a table of
    the same rows, or makes a valid value NaN or infinite. `step` is only for the message.
    """
    for i, piece in enumerate(chain):
        name = f"advantage[{i}]: '{piece.entry.full_name}'"
        try:
            result = piece(table)
        except ConfigError:
            raise
        except Exception as error:
            raise ChainError(f"{name} raised {type(error).__name__} at step {step}: {error}") from error
        is_table = type(result) is RewardTable
        if not is_table or result.uids != table.uids:
            what = f"one of {len(result)} rows" if is_table else type(result).__name__
            raise ChainError(f"{name} must return a reward table of the same {len(table)} rows, not {what}")
        wrong = result.valid & ~result.values.isfinite()  # what is not valid may have any value
        if wrong.any():
            row, column, place = wrong.nonzero()[0].tolist()
            # The piece may have made more places than there were, as `per_step` does.
            before = table.values[row, :, min(place, table.values.shape[2] - 1)].tolist()
            raise ChainError(
                f"{name} made {int(wrong.sum())} valid values non-finite at step {step}, the first of them "
                f"{result.values[row, column, place].item()} for '{result.names[column]}' of prompt "
                f"'{result.uids[row]}', which was {before}; divide only where there is something to divide "
                "by, or mark the value as not valid"
            )
        table = result
    return table


def per_step_only(name: str, value: Tensor) -> None:
    """Raise `ChainError` unless an output that the chain reads has one number per step: (N, T)."""
    if value.dim() != 2:
        raise ChainError(
            f"the advantage chain reads '{name}', which has {tuple(value.shape[2:])} numbers per step; a "
            "reward table holds one. Read it in an objective (`extra`), or one number of it in the chain"
        )
