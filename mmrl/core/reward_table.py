"""The reward table: rewards of outcomes, before they are advantages."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.tensor import group_count, group_extreme, group_index, group_mean, group_std, pad_to
from mmrl.core.types import Rollouts, Trajectory

EQUAL = 1e-8  # rewards closer than this are the same
ABSENT = -1  # `ends` of a place that a row does not have


def name_id(name: str) -> int:
    """Number a name in 63 bits, the same in every process, round and run. The empty name is 0."""
    if not name:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Groups:
    """The comparisons of a table: statistics of every entry's group over its valid entries, each as (N, R,
    K)."""

    values: Tensor  # (N * K, R)
    valid: Tensor  # (N * K, R)
    index: Tensor  # (N * K,)
    shape: tuple[int, int, int]

    @staticmethod
    def of(values: Tensor, valid: Tensor, index: Tensor) -> Groups:
        """Line entries up: `values` and `valid` are (N, R, K), `index` is (N, K)."""
        rows, rewards, places = values.shape
        flat = (values.transpose(1, 2).reshape(-1, rewards), valid.transpose(1, 2).reshape(-1, rewards))
        return Groups(*flat, index.flatten(), (rows, rewards, places))

    def _back(self, flat: Tensor) -> Tensor:
        rows, rewards, places = self.shape
        return flat.view(rows, places, rewards).transpose(1, 2)

    def count(self) -> Tensor:
        """Count the valid entries."""
        return self._back(group_count(self.index, self.valid))

    def mean(self) -> Tensor:
        """Average."""
        return self._back(group_mean(self.values, self.index, self.valid))

    def std(self, unbiased: bool = True) -> Tensor:
        """Measure the spread; 0 for fewer than two."""
        return self._back(group_std(self.values, self.index, self.valid, unbiased=unbiased))

    def largest(self) -> Tensor:
        """Find the largest."""
        return self._back(group_extreme(self.values, self.index, self.valid))

    def smallest(self) -> Tensor:
        """Find the smallest."""
        return self._back(group_extreme(self.values, self.index, self.valid, largest=False))

    def flat(self) -> Tensor:
        """Tell whether all entries are equal; then no comparison says anything."""
        return self.largest() - self.smallest() <= EQUAL


@dataclass(frozen=True)
class RewardTable:
    """How good it was. Every process holds the same, whole table; it is numbers only, in float64 on the CPU.

    Letters: `N` rollouts, `R` named rewards, `K` outcomes of a rollout (places), `T` steps.
    """

    values: Tensor  # (N, R, K) weighted rewards; only valid entries mean something
    valid: Tensor  # (N, R, K) False where a reward does not apply, or there is no outcome
    names: tuple[str, ...]  # R
    scored: Mapping[str, Tensor]  # (N, K) every reward as measured, NaN where it does not apply
    weights: Tensor  # (R,) used by `total`
    ends: Tensor  # (N, K) int64: how many steps the outcome has seen; ABSENT: no outcome
    ids: Mapping[str, Tensor]  # (N, K) int64: "group", "row", "place", "on_policy" and every tag
    notes: Mapping[str, Tensor]  # (N, T) from the engine, NaN where nothing was noted
    length: Tensor  # (N,) int64
    learn: Tensor  # (N, K) False: counts in the statistics, is not learned from
    uids: tuple[str, ...]  # N
    process: Tensor  # (N,) int64: who holds the rollout
    rank: int = 0  # which process this is

    @staticmethod
    def empty() -> RewardTable:
        """Make the table that others are joined to."""
        none = torch.zeros(0, dtype=torch.int64)
        flat = none.view(0, 0)
        return RewardTable(
            values=flat.view(0, 0, 0).double(),
            valid=flat.view(0, 0, 0).bool(),
            names=(),
            scored={},
            weights=none.double(),
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
    def present(self) -> Tensor:
        """Tell which places hold an outcome: (N, K)."""
        return self.ends != ABSENT

    @property
    def last(self) -> Tensor:
        """Find the place of every row's answer: (N,)."""
        return self.present.sum(-1) - 1

    @property
    def mine(self) -> Tensor:
        """Tell which rows this process holds: (N,)."""
        return self.process == self.rank

    @property
    def group(self) -> Tensor:
        """Name the group of every row: (N,)."""
        return self.ids["group"][:, 0]

    def replace(self, **changes) -> RewardTable:
        """Copy the table with some columns changed."""
        return dataclasses.replace(self, **changes)

    def put(self, values: Tensor) -> RewardTable:
        """Copy the table with other values: (N, R, K)."""
        return self.replace(values=values)

    def note(self, name: str, values: Tensor) -> RewardTable:
        """Copy the table with one more note: (N, T)."""
        return self.replace(notes={**self.notes, name: values})

    def at_end(self, name: str) -> Tensor:
        """Look up a reward as measured for every row's answer: (N,), NaN where it does not apply."""
        if name not in self.scored:
            raise ValueError(
                f"no reward is called '{name}'; there are {', '.join(sorted(self.scored)) or 'none'}"
            )
        return self.scored[name].gather(1, self.last.clamp(min=0)[:, None])[:, 0]

    @property
    def absent(self) -> dict[str, str]:
        """Name the rewards and labels that apply to no outcome, though none of their calls failed, each with
        a sentence that says so."""
        seen = f"all {int(self.present.sum())} outcomes of {len(set(self.uids))} prompts"
        return {
            name: f"'{name}' gave None for {seen}"
            for name, values in self.scored.items()
            if len(self) and values.isnan().all() and f"fault/{name}" not in self.ids
        }

    def reward(self) -> Tensor:
        """Sum up the weighted rewards of every row's answer, as measured: (N,), NaN where none applies."""
        weights = dict(zip(self.names, self.weights.tolist(), strict=True))
        measured = torch.stack([self.at_end(name) * weight for name, weight in weights.items()], 1)
        return torch.where(measured.isnan().all(1), torch.nan, measured.nansum(1))

    def index(self, by: Sequence[str]) -> Tensor:
        """Number the comparisons: entries with one number agree in every id of `by`. Shape (N, K); no `by`:
        all are one."""
        unknown = [name for name in by if name not in self.ids]
        if unknown:
            raise ValueError(f"cannot compare by {unknown}: outcomes have the ids {sorted(self.ids)}")
        columns = [self.ids[name].flatten() for name in by] or [
            torch.zeros(self.ends.numel(), dtype=torch.int64)
        ]
        return group_index(columns).view(self.ends.shape)

    def groups(self, by: Sequence[str]) -> Groups:
        """Set the entries against those that agree in every id of `by`."""
        return Groups.of(self.values, self.valid, self.index(by))

    def select(self, rows: Tensor) -> RewardTable:
        """Keep some rows: (n,) indices, or (N,) bool. Ids stay as they were."""
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return self.replace(
            values=self.values[rows],
            valid=self.valid[rows],
            ends=self.ends[rows],
            learn=self.learn[rows],
            scored={k: v[rows] for k, v in self.scored.items()},
            ids={k: v[rows] for k, v in self.ids.items()},
            notes={k: v[rows] for k, v in self.notes.items()},
            length=self.length[rows],
            uids=tuple(self.uids[i] for i in rows.tolist()),
            process=self.process[rows],
        )

    def take(self, places: Tensor, values: Tensor, ends: Tensor) -> RewardTable:
        """Lay out other places: `places` (N, K') says which old place each comes from, `ends` (N, K') where
        it stands."""
        here = ends != ABSENT
        ids = {name: column.gather(1, places) for name, column in self.ids.items()}
        ids["place"] = torch.arange(places.shape[1]).expand(places.shape)
        valid = self.valid.gather(2, places[:, None].expand(-1, len(self.names), -1))
        return self.replace(
            values=values,
            valid=valid & here[:, None],
            ends=ends,
            ids=ids,
            learn=self.learn.gather(1, places),
            scored={name: column.gather(1, places) for name, column in self.scored.items()},
        )

    def after_first(self, values: Tensor) -> RewardTable:
        """Drop the first place: what K outcomes measured becomes K - 1 credits. `values` is (N, R, K - 1)."""
        places = torch.arange(1, self.ends.shape[1]).expand(len(self), -1)
        return self.take(places, values, self.ends[:, 1:])

    def join(self, other: RewardTable) -> RewardTable:
        """Put the rows of another round behind these. Rows are renumbered; everything else keeps its id."""
        if not len(self):
            return other
        if self.names != other.names:
            raise ValueError(f"two rounds of one collection have the rewards {self.names} and {other.names}")
        places = max(self.ends.shape[1], other.ends.shape[1])
        both = [table._widen(places, set(self.ids) | set(other.ids)) for table in (self, other)]
        steps = max((note.shape[1] for table in both for note in table.notes.values()), default=0)
        notes = {
            name: torch.cat([_note(table, name, steps) for table in both])
            for name in dict.fromkeys([*self.notes, *other.notes])
        }
        joined = {
            name: torch.cat([getattr(table, name) for table in both])
            for name in ("values", "valid", "ends", "length", "learn", "process")
        }
        ids = {name: torch.cat([table.ids[name] for table in both]) for name in both[0].ids}
        ids["row"] = torch.arange(len(self) + len(other))[:, None].expand(-1, places)
        scored = {name: torch.cat([table.scored[name] for table in both]) for name in self.scored}
        return self.replace(**joined, ids=ids, notes=notes, scored=scored, uids=self.uids + other.uids)

    def _widen(self, places: int, tags: set[str]) -> RewardTable:
        """Give the table more places, and every tag."""
        none = torch.zeros_like(self.ends)
        ids = {name: pad_to(self.ids.get(name, none), places, 1) for name in sorted(tags)}
        ids["place"] = torch.arange(places).expand(len(self), -1)
        for name in ("group", "row", "on_policy"):
            ids[name] = self.ids[name][:, :1].expand(-1, places)
        return self.replace(
            values=pad_to(self.values, places, 2),
            valid=pad_to(self.valid, places, 2, False),
            ids=ids,
            ends=pad_to(self.ends, places, 1, ABSENT),
            learn=pad_to(self.learn, places, 1, False),
            scored={name: pad_to(column, places, 1, float("nan")) for name, column in self.scored.items()},
        )

    def num_groups(self, keep: Tensor) -> int:
        """Count the groups that have a row in `keep` (N,) bool."""
        return int(self.group[keep].unique().numel()) if len(self) else 0


@dataclass(frozen=True)
class Collection:
    """The rollouts of one training step and their rewards.

    `stand_in` is a rollout that a process without rows of its own sends through the model, because every
    process has to take part in the passes of a sharded one; nothing is learned from it.
    """

    rollouts: Rollouts  # this process's rows of `table`, in order
    table: RewardTable  # the groups that are learned from
    seen: RewardTable  # all groups, those included that the filter dropped
    stand_in: Trajectory


@dataclass(frozen=True)
class Measured:
    """What an evaluation found. `intervals` holds (low, high) of every metric; `rollouts` are this process's
    rows of `table`."""

    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    rollouts: Rollouts
    table: RewardTable


def _note(table: RewardTable, name: str, steps: int) -> Tensor:
    """Give a note `steps` columns, NaN where the table noted nothing."""
    nothing = torch.full((len(table), 0), float("nan"), dtype=torch.float64)
    return pad_to(table.notes.get(name, nothing), steps, 1, float("nan"))


def place_of_steps(ends: Tensor, num_steps: int) -> Tensor:
    """Find the place each step belongs to: (N, K) ends to (N, T) places.

    A step takes the first outcome of its row that ends after it; steps behind the last end take the last.
    """
    present = ends != ABSENT
    last = (present.sum(-1, keepdim=True) - 1).clamp(min=0)
    # Absent places stand behind all others, and are never reached because the result is clamped to the last
    # present one.
    sortable = torch.where(present, ends, torch.iinfo(torch.int64).max)
    steps = torch.arange(num_steps).expand(len(ends), -1).contiguous()
    return torch.minimum(torch.searchsorted(sortable.contiguous(), steps, right=True), last)
