"""The reward table: the rewards of a step's rollouts, from which advantage functions compute advantages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.core.tensor import (
    group_count,
    group_extreme,
    group_index,
    group_mean,
    group_rank,
    group_std,
    group_sum,
    pad_to,
)
from mmrl.core.types import Rollouts, Trajectory

EQUAL = 1e-8  # rewards closer than this count as equal
ABSENT = -1  # value of `ends` where the row has no outcome
NAN = float("nan")


def name_id(name: str) -> int:
    """Hash a name to 63 bits, equal in every process and run; 0 for the empty name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 if name else 0


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each entry's group, over valid entries: (N rows, R rewards, K outcomes) each."""

    values: Tensor  # (N, R, K)
    valid: Tensor  # (N, R, K)
    index: Tensor  # (N, K) number of the group

    def _over(self, statistic: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        # Flatten to entries: one per outcome of a row, N * K in total, with R rewards each.
        values, valid = (t.transpose(1, 2).flatten(0, 1) for t in (self.values, self.valid))
        rows, rewards, places = self.values.shape
        result = statistic(values, self.index.flatten(), valid)
        return result.view(rows, places, rewards).transpose(1, 2)

    def count(self) -> Tensor:
        """Count the valid entries of each group."""
        return self._over(lambda values, index, valid: group_count(index, valid))

    def mean(self) -> Tensor:
        """Compute the mean of each group."""
        return self._over(group_mean)

    def std(self, unbiased: bool = True) -> Tensor:
        """Compute the standard deviation of each group; 0 for fewer than two entries."""
        return self._over(partial(group_std, unbiased=unbiased))

    def largest(self) -> Tensor:
        """Find the largest value of each group."""
        return self._over(group_extreme)

    def smallest(self) -> Tensor:
        """Find the smallest value of each group."""
        return self._over(partial(group_extreme, largest=False))

    def sum(self) -> Tensor:
        """Sum the values of each group."""
        return self._over(lambda v, index, valid: group_sum(torch.where(valid, v, 0.0), index)[index])

    def rank(self) -> Tensor:
        """Rank valid entries of each group, ascending from 0, ties by row; invalid entries come last."""
        return self._over(group_rank)

    def at_rank(self, rank: Tensor) -> Tensor:
        """Return the value of each group at a rank; 0 if no valid entry has this rank."""
        chosen = self.valid & (self.rank() == rank)
        return dataclasses.replace(self, valid=chosen).sum()

    def median(self) -> Tensor:
        """Find the median of each group, the lower of two middle values; 0 for a group without entries."""
        return self.at_rank((self.count().long() - 1).div(2, rounding_mode="floor"))

    def flat(self) -> Tensor:
        """Whether all values of a group are equal, so that there is nothing to compare."""
        return self.largest() - self.smallest() <= EQUAL


@dataclass(frozen=True)
class RewardTable:
    """The rewards of rollouts and the ids of the groups that are compared, in float64 on the CPU.

    Every process has the whole table. In shapes, `N` counts rollouts, `R` named rewards, `K` outcomes of a
    rollout, and `T` steps.
    """

    TENSORS: ClassVar = ("values", "valid", "ends", "length", "learn", "process")  # columns of N rows
    MAPPINGS: ClassVar = ("scored", "ids", "notes")  # mappings from names to columns of N rows
    IDS: ClassVar = frozenset({"group", "row", "place", "on_policy", "text"})  # ids that are not tags

    values: Tensor  # (N, R, K) rewards, later advantages; defined where `valid`
    valid: Tensor  # (N, R, K) False where a reward does not apply, or there is no outcome
    weights: Mapping[str, float]  # names of the R rewards, in order, with their weights in a sum
    scored: Mapping[str, Tensor]  # (N, K) by reward: as measured, `values` may change later; or NaN
    ends: Tensor  # (N, K) int64: number of steps up to the outcome's end; ABSENT: no outcome
    ids: Mapping[str, Tensor]  # (N, K) int64 by name: `IDS` and every tag
    notes: Mapping[str, Tensor]  # (N, T) values from the engine, NaN if not recorded
    length: Tensor  # (N,) int64
    learn: Tensor  # (N, K) False: counts in statistics, but is not learned from
    uids: tuple[str, ...]  # prompt id of each of the N rows
    process: Tensor  # (N,) int64: rank of the process that has the rollout
    rank: int = 0  # rank of this process

    @staticmethod
    def empty() -> RewardTable:
        """Create a table without rows."""
        none = torch.zeros(0, dtype=torch.int64)
        flat = none.view(0, 0)
        return RewardTable(
            values=flat.view(0, 0, 0).double(),
            valid=flat.view(0, 0, 0).bool(),
            weights={},
            scored={},
            ends=flat,
            ids={},
            notes={},
            length=none,
            learn=flat.bool(),
            uids=(),
            process=none,
        )

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the R rewards."""
        return tuple(self.weights)

    @property
    def present(self) -> Tensor:
        """Whether each entry is an outcome, not padding: (N, K) bool."""
        return self.ends != ABSENT

    @property
    def last(self) -> Tensor:
        """The index of each row's last outcome, which is its answer: (N,)."""
        return self.present.sum(-1) - 1

    @property
    def mine(self) -> Tensor:
        """Whether a row's rollout is on this process: (N,) bool."""
        return self.process == self.rank

    @property
    def longest(self) -> int:
        """The largest number of steps of a row; 1 for an empty table."""
        return int(self.length.max()) if len(self) else 1

    @property
    def group(self) -> Tensor:
        """The id of each row's group: (N,)."""
        return self.ids["group"][:, 0]

    def replace(self, **changes) -> RewardTable:
        """Copy the table with some columns changed."""
        return dataclasses.replace(self, **changes)

    def put(self, values: Tensor) -> RewardTable:
        """Copy the table with other values: (N, R, K)."""
        return self.replace(values=values)

    def note(self, name: str, values: Tensor) -> RewardTable:
        """Copy the table and add a note, a column of values per step: (N, T)."""
        return self.replace(notes={**self.notes, name: values})

    def at_end(self, name: str) -> Tensor:
        """Return the measured reward of each row's answer: (N,), NaN if it does not apply.

        For a conversation this is the sum over its turns.
        """
        if name not in self.scored:
            raise ValueError(
                f"no reward is called '{name}'; there are {', '.join(sorted(self.scored)) or 'none'}"
            )
        measured = self.scored[name]
        if "turn" in self.ids and measured.shape[1] > 1:
            return torch.where(measured.isnan().all(1), torch.nan, measured.nansum(1))
        return measured.gather(1, self.last.clamp(min=0)[:, None])[:, 0]

    def tag(self, name: str) -> Tensor:
        """Return the ids named `name`, such as hashed texts of a tag, of each outcome: (N, K), 0 if absent.

        Raises `ValueError` if the table has no ids of this name.
        """
        if name not in self.ids:
            raise ValueError(
                f"no outcome has the tag '{name}', which the engine or the data set has to set (engines of "
                f"conversations, games and trees set their own); there are {', '.join(sorted(self.ids))}"
            )
        return self.ids[name]

    @property
    def absent(self) -> dict[str, str]:
        """Warnings by reward name, for rewards that returned None for every outcome without failing."""
        seen = f"all {int(self.present.sum())} outcomes of {len(set(self.uids))} prompts"
        return {
            name: f"'{name}' gave None for {seen}"
            for name, values in self.scored.items()
            if len(self) and values.isnan().all() and f"fault/{name}" not in self.ids
        }

    def weighted_sum(self) -> Tensor:
        """Sum the weighted values of each entry: (N, K); a reward that does not apply adds nothing."""
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float64)
        return (torch.where(self.valid, self.values, 0.0) * weights[:, None]).sum(1)

    def reward(self) -> Tensor:
        """Sum the weighted rewards of each row's answer as measured: (N,), NaN where none applies."""
        if not self.weights:
            return torch.full((len(self),), torch.nan, dtype=torch.float64)
        measured = torch.stack([self.at_end(name) * weight for name, weight in self.weights.items()], 1)
        return torch.where(measured.isnan().all(1), torch.nan, measured.nansum(1))

    def index(self, by: Sequence[str]) -> Tensor:
        """Number the groups (N, K) of entries with equal ids for all names in `by`; empty `by`: one group."""
        columns = [self.tag(name) for name in by] or [torch.zeros_like(self.ends)]
        return group_index([column.flatten() for column in columns]).view(self.ends.shape)

    def groups(self, by: Sequence[str]) -> GroupStatistics:
        """Return statistics over the groups of entries that have equal ids for all names in `by`."""
        return GroupStatistics(self.values, self.valid, self.index(by))

    def select(self, rows: Tensor) -> RewardTable:
        """Select rows by (n,) indices or (N,) bool; ids do not change."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        uids = tuple(self.uids[i] for i in rows.tolist())
        return self.replace(**_columns(lambda column: column[rows], self), uids=uids)

    def take(self, places: Tensor, values: Tensor, ends: Tensor) -> RewardTable:
        """Select the outcomes with indices `places` (N, K'), and set their values (N, R, K') and ends."""
        valid, none = self.valid.gather(2, places[:, None].expand(-1, len(self.names), -1)), ends == ABSENT
        ids = {name: column.gather(1, places) for name, column in self.ids.items()}
        return self.replace(
            values=values,
            valid=valid & ~none[:, None],
            ends=ends,
            ids={**ids, "place": torch.arange(places.shape[1]).expand(places.shape)},
            learn=self.learn.gather(1, places),
            scored={n: column.gather(1, places).masked_fill(none, NAN) for n, column in self.scored.items()},
        )

    def after_first(self, values: Tensor) -> RewardTable:
        """Drop the first outcome of each row, and set `values` (N, R, K - 1) for the others.

        If no row has a second outcome, one absent outcome is left.
        """
        if self.ends.shape[1] == 1:
            nothing = torch.zeros_like(self.ends)
            return self.take(nothing, torch.zeros_like(self.values), torch.full_like(nothing, ABSENT))
        places = torch.arange(1, self.ends.shape[1]).expand(len(self), -1)
        return self.take(places, values, self.ends[:, 1:])

    def join(self, other: RewardTable) -> RewardTable:
        """Append the rows of another sampling round; rows are renumbered, all other ids do not change."""
        if not len(self) or not len(other):
            return self if len(self) else other
        if self.names != other.names:
            raise ValueError(f"two rounds of one collection have the rewards {self.names} and {other.names}")
        joined = _columns(lambda *parts: torch.cat(parts), self.widen(other), other.widen(self))
        joined["ids"]["row"] = torch.arange(len(self) + len(other))[:, None].expand_as(joined["ends"])
        return self.replace(**joined, uids=self.uids + other.uids)

    def widen(self, other: RewardTable) -> RewardTable:
        """Pad the table so that it also has all outcomes, steps, tags and notes of another table."""
        places = max(self.ends.shape[1], other.ends.shape[1])
        steps = max((n.shape[1] for table in (self, other) for n in table.notes.values()), default=0)
        no_tag, no_note = torch.zeros_like(self.ends), self.values.new_empty(len(self), 0)
        tags = sorted({*self.ids, *other.ids})
        ids = {name: pad_to(self.ids.get(name, no_tag), places, 1) for name in tags}
        ids["place"] = torch.arange(places).expand(len(self), -1)
        for name in ("group", "row", "on_policy"):  # ids that all outcomes of a row share
            ids[name] = self.ids[name][:, :1].expand(-1, places)
        noted = dict.fromkeys([*self.notes, *other.notes])
        return self.replace(
            values=pad_to(self.values, places, 2),
            valid=pad_to(self.valid, places, 2, False),
            ids=ids,
            ends=pad_to(self.ends, places, 1, ABSENT),
            learn=pad_to(self.learn, places, 1, False),
            scored={name: pad_to(column, places, 1, NAN) for name, column in self.scored.items()},
            notes={name: pad_to(self.notes.get(name, no_note), steps, 1, NAN) for name in noted},
        )

    def num_groups(self, keep: Tensor) -> int:
        """Count the groups that have a row in `keep` (N,) bool."""
        return int(self.group[keep].unique().numel()) if len(self) else 0


@dataclass(frozen=True)
class Collection:
    """The rollouts of one training step and their rewards.

    `stand_in` is a dummy rollout, not learned from, for a process without rows: every process must take
    part in the passes of a sharded model.
    """

    rollouts: Rollouts  # this process's rows of `table`, in order
    table: RewardTable  # the groups that are learned from
    seen: RewardTable  # all groups, including those that the filter dropped
    stand_in: Trajectory


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation; `rollouts` are this process's rows of `table`."""

    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]  # confidence intervals (low, high) of metrics
    rollouts: Rollouts
    table: RewardTable
    correct: str = ""  # name of the reward that marks correct answers, if one was chosen


def _columns(change: Callable[..., Tensor], *tables: RewardTable) -> dict[str, Any]:
    """Apply a function to every column of a table, or of several tables with the same columns."""
    named = [vars(table) for table in tables]
    changed: dict[str, Any] = {
        name: change(*(columns[name] for columns in named)) for name in RewardTable.TENSORS
    }
    for name in RewardTable.MAPPINGS:
        changed[name] = {key: change(*(columns[name][key] for columns in named)) for key in named[0][name]}
    return changed


def place_of_steps(ends: Tensor, num_steps: int) -> Tensor:
    """Return the index (N, T) of the outcome that each step belongs to, given outcome `ends` (N, K).

    A step belongs to the first outcome that ends after it, or to the last outcome if none does.
    """
    present = ends != ABSENT
    last = (present.sum(-1, keepdim=True) - 1).clamp(min=0)
    # Treat absent outcomes as ending last, and clamp to the last present outcome.
    sortable = torch.where(present, ends, torch.iinfo(torch.int64).max)
    steps = torch.arange(num_steps).expand(len(ends), -1).contiguous()
    return torch.minimum(torch.searchsorted(sortable.contiguous(), steps, right=True), last)
