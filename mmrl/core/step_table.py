"""The step table: a batch of rollouts with an advantage per step, from which objectives learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.reward_table import RewardTable, place_of_steps
from mmrl.core.tensor import pad_to
from mmrl.core.types import Steps, Unit


@dataclass(frozen=True)
class StepOutput:
    """A policy's output for N rows of T steps: `logp` (N, T), and further outputs `extra` (N, T, ...)."""

    logp: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> StepOutput:
        """Apply a function to every tensor."""
        return StepOutput(change(self.logp), {name: change(value) for name, value in self.extra.items()})

    def detach(self) -> StepOutput:
        """Detach all tensors from the graph."""
        return self.map(Tensor.detach)

    def __getitem__(self, rows: Tensor) -> StepOutput:
        return self.map(lambda value: value[rows])


@dataclass(frozen=True)
class Totals:
    """The counts of one update by which losses are divided, averaged over processes."""

    steps: float = 0.0
    rows: float = 0.0
    groups: float = 0.0
    drawn: float = 0.0  # rows after the group filter, including rows without an advantage


@dataclass(frozen=True)
class Batch:
    """A padded batch of rollouts, with everything that an objective reads.

    `N` rows, `T` steps. The objective sets `weight`, which includes the division by `totals`.
    """

    group: Tensor  # (N,) int64
    mask: Tensor  # (N, T) 1 where the policy sampled the step and learns from it
    steps: Steps
    advantage: Tensor  # (N, T)
    weight: Tensor  # (N, T)
    notes: Mapping[str, Tensor] = field(default_factory=dict)  # (N, T) values from the engine, or NaN
    others: Mapping[str, StepOutput] = field(default_factory=dict)  # by policy: "old", "ref", ...
    totals: Totals = Totals()
    drawn: float | None = None  # rows after the group filter, before the advantage chain; None: `len(self)`
    order: tuple[int, ...] = ()  # group ids of the step on all processes, split by `parts`; empty: `group`
    rows: Tensor = torch.zeros(0, dtype=torch.int64)  # (N,) index in the step's rollouts; empty if unknown

    @staticmethod
    def of(steps: Steps, mask: Tensor, notes: Mapping[str, Tensor]) -> Batch:
        """Create a batch without advantages; `mask` (N, T) is 1 for steps sampled by the policy."""
        nothing = torch.zeros_like(mask)
        return Batch(torch.zeros(len(mask), dtype=torch.int64), mask, steps, nothing, nothing, notes)

    def __len__(self) -> int:
        return len(self.mask)

    def replace(self, **changes) -> Batch:
        """Copy the batch with some columns changed."""
        return dataclasses.replace(self, **changes)

    def by(self, name: str, new: StepOutput) -> StepOutput:
        """Return the outputs of policy `name`; without outputs of `old`, return `new` detached (ratio 1)."""
        return new.detach() if name == "old" and name not in self.others else self.others[name]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every (N, T) column."""
        return self.replace(
            mask=change(self.mask),
            advantage=change(self.advantage),
            weight=change(self.weight),
            notes={name: change(note) for name, note in self.notes.items()},
            others={name: other.map(change) for name, other in self.others.items()},
        )

    def on(self, device: torch.device) -> Batch:
        """Move all tensors to a device, except `steps`, which the policy moves."""
        return self._map(lambda column: column.to(device)).replace(group=self.group.to(device))

    def select(self, rows: Tensor, columns: slice = slice(None)) -> Batch:
        """Select rows by their indices (n,), and a range of steps."""
        return self._map(lambda column: column[rows][:, columns]).replace(
            group=self.group[rows],
            steps=self.steps[rows, columns],
            rows=self.rows[rows.cpu()] if len(self.rows) else self.rows,
        )

    def blank(self) -> Batch:
        """Return the first row with mask and advantage 0: dummy input for a process with nothing to learn."""
        first = self.select(torch.tensor([0]))
        nothing = torch.zeros_like(first.mask)
        return first.replace(mask=nothing, advantage=torch.zeros_like(first.advantage), drawn=0.0)

    def count(self) -> Totals:
        """Count steps with mask 1, rows and groups that have any, and rows after the group filter."""
        rows = self.mask.sum(-1) > 0  # (N,)
        groups = self.group[rows].unique().numel()
        drawn = len(self) if self.drawn is None else self.drawn
        return Totals(float(self.mask.sum()), float(rows.sum()), float(groups), float(drawn))

    def parts(self, num_parts: int) -> Iterator[Batch]:
        """Split the batch into parts of whole groups, one per optimizer step; an empty part is one blank row.

        Groups are split globally, so a part has the same groups for any number of processes.
        `drawn`, the number of rows drawn for the update, is divided evenly among the parts.
        """
        drawn = None if self.drawn is None else self.drawn / num_parts
        names = self.order or tuple(dict.fromkeys(self.group.tolist()))
        for part in range(num_parts):
            mine = names[part * len(names) // num_parts : (part + 1) * len(names) // num_parts]
            rows = torch.isin(self.group, torch.tensor(mine, dtype=torch.int64)).nonzero()[:, 0]
            part = self.select(rows) if len(rows) else self.blank()
            yield part if drawn is None else part.replace(drawn=drawn)

    def split(self, max_steps: int, unit: Unit) -> list[Batch]:
        """Split the batch into the micro-batches that `cuts` chooses."""
        return [self.select(rows, columns) for rows, columns in self.cuts(max_steps, unit)]

    def cuts(self, max_steps: int, unit: Unit) -> list[tuple[Tensor, slice]]:
        """Choose the rows and steps of micro-batches whose `steps.cost` is at most `max_steps`.

        A micro-batch holds at least one `unit`, even if that exceeds `max_steps`. Groups stay together if
        possible, since their rows share a prompt. Rows of different `steps.buckets` go into different
        micro-batches, unless `unit` is GROUP and they belong to the same group.
        """
        unit = max(unit, self.steps.unit)
        buckets = getattr(self.steps, "buckets", torch.zeros(len(self), dtype=torch.int64)).tolist()
        groups: dict[tuple[int, int], list[int]] = {}  # in order of first appearance
        for row, (bucket, name) in enumerate(zip(buckets, self.group.tolist(), strict=True)):
            groups.setdefault((name, 0 if unit == Unit.GROUP else bucket), []).append(row)
        apart: dict[tuple[int, ...], list[list[int]]] = {}  # groups, by the buckets that their rows are in
        for whole in groups.values():
            apart.setdefault(tuple(sorted({buckets[row] for row in whole})), []).append(whole)
        return [cut for held in sorted(apart) for cut in self._cuts(apart[held], max_steps, unit)]

    def _cuts(
        self, groups: Sequence[list[int]], max_steps: int, unit: Unit
    ) -> Iterator[tuple[Tensor, slice]]:
        """Choose the micro-batches of groups whose rows may be in the same micro-batch."""
        num_steps = self.mask.shape[1]
        everything = [row for whole in groups for row in whole]
        if self._cost(everything) <= max_steps:
            yield torch.tensor(everything), slice(None)
            return
        micros: list[list[int]] = [[]]
        for whole in groups:
            # Start a new micro-batch for a group that fits into an empty one but not into the current one.
            if micros[-1] and self._cost(micros[-1] + whole) > max_steps >= self._cost(whole):
                micros.append([])
            for piece in [whole] if unit == Unit.GROUP else [[row] for row in whole]:
                if micros[-1] and self._cost(micros[-1] + piece) > max_steps:
                    micros.append([])
                micros[-1] = micros[-1] + piece
        for rows in filter(None, micros):
            cost, columns = self._cost(rows), [slice(None)]
            if unit == Unit.STEP and cost > max_steps and num_steps > 1:
                width = max(1, num_steps * max_steps // cost)  # cost is about proportional to width
                columns = [slice(at, min(at + width, num_steps)) for at in range(0, num_steps, width)]
            yield from ((torch.tensor(rows), column) for column in columns)

    def _cost(self, rows: list[int]) -> int:
        return self.steps.cost(torch.tensor(rows))


def spread(credit: RewardTable, batch: Batch) -> Batch:
    """Assign the advantages and the recorded values of a table to the steps of a collated batch.

    `credit` has one reward, and the rows of `batch` in the same order. If `credit` has no rows, the batch
    becomes blank. Raises `ValueError` for several rewards.
    """
    if len(credit.names) > 1:
        raise ValueError(
            f"the advantage chain ended with {len(credit.names)} rewards {credit.names}; "
            "add `total` to combine them"
        )
    if not len(credit):
        return batch.replace(rows=torch.arange(len(batch))).blank()
    num_steps = batch.mask.shape[1]
    places = place_of_steps(credit.ends, num_steps)  # (N, T)
    learned = (credit.learn & credit.valid[:, 0]).gather(1, places)
    advantage = torch.where(credit.valid[:, 0], credit.values[:, 0], 0.0).gather(1, places)
    device = batch.mask.device
    notes = {
        name: pad_to(note, num_steps, 1, float("nan"))[:, :num_steps].float().to(device)
        for name, note in credit.notes.items()
        if name not in batch.notes  # keep notes that `collate` already set
    }
    mask = batch.mask * learned.to(device)
    return batch.replace(
        group=credit.group.to(device),
        mask=mask,
        advantage=advantage.float().to(device) * mask,  # the table is float64
        notes={**batch.notes, **notes},
        rows=torch.arange(len(credit)),
    )
