"""The pieces of a training method, built from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.schema import ConfigError
from mmrl.core.episodes import has_turns, join_episodes, merge_turns, part_episodes
from mmrl.core.protocols import Engine, Sampler
from mmrl.core.reward_table import RewardTable
from mmrl.references import Reference


@dataclass
class Method:
    """The pieces of a training method that produce rollouts and rewards."""

    references: Mapping[str, Reference]
    sampler: Sampler
    engine: Engine
    rewards: Sequence[Bound]
    group_filter: Bound
    noted: frozenset[str] = frozenset()  # names of per-step engine records that other pieces read


# ---- the advantage chain: functions that turn a reward table into a table of advantages


class ChainError(ValueError):
    """Raised if an advantage function fails, or does not return a table with finite values."""


def through_chain(chain: Sequence[Bound], table: RewardTable, step: int) -> RewardTable:
    """Compute advantages from a reward table by the advantage functions, in order.

    The functions get one row per episode; the turns of a conversation are its outcomes. If no function reads
    turns, they are merged to a single outcome.

    Raises `ChainError` with the name of the function if it fails, does not return a table of the same rows,
    or makes a valid value NaN or infinite. `step` is only used in the message.
    """
    rows, table = table, join_episodes(table)
    if has_turns(table) and not any(piece.needs.turns for piece in chain):
        table, _ = merge_turns(table)
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
        wrong = result.valid & ~result.values.isfinite()  # masked entries may have any value
        if wrong.any():
            row, column, place = wrong.nonzero()[0].tolist()
            # If the function added this outcome, as `per_step` does for every step, show the last old one.
            before = table.values[row, :, min(place, table.values.shape[2] - 1)].tolist()
            raise ChainError(
                f"{name} made {int(wrong.sum())} valid values non-finite at step {step}, the first of them "
                f"{result.values[row, column, place].item()} for '{result.names[column]}' of prompt "
                f"'{result.uids[row]}', which was {before}; divide only where there is something to divide "
                "by, or mark the value as not valid"
            )
        table = result
    return part_episodes(table, rows)


def per_step_only(name: str, value: Tensor) -> None:
    """Raise `ChainError` unless a model output that advantage functions read has shape (rows, steps)."""
    if value.dim() != 2:
        raise ChainError(
            f"the advantage chain reads '{name}', which has {tuple(value.shape[2:])} numbers per step; a "
            "reward table holds one. Read it in an objective (`extra`), or one number of it in the chain"
        )
