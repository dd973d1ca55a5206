"""Columns of a step table whose values differ in shape between rows, such as velocities of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from mmrl.core.tensor import pad_to


@dataclass(frozen=True)
class Ragged:
    """A column (N rows, T steps, ...) whose values differ in shape, stored as one tensor per shape.

    Args:
        parts: One tensor per shape.
        part: (N,) index in `parts` of the tensor that has the row.
        row: (N,) index of the row in its tensor.
    """

    parts: tuple[Tensor, ...]
    part: Tensor
    row: Tensor

    def __getitem__(self, key: Any) -> Any:
        """Select rows by a tensor of indices, or steps by `[:, columns]`."""
        if isinstance(key, tuple):
            return replace(self, parts=tuple(part[key] for part in self.parts))
        part, row = self.part[key.cpu()], self.row[key.cpu()]
        held = part.unique().tolist()
        return self.parts[held[0]][row] if len(held) == 1 else replace(self, part=part, row=row)

    def to(self, device: torch.device) -> Ragged:
        """Move all tensors to a device."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))


@dataclass
class Gathered:
    """Collects outputs of micro-batches into columns of the whole batch, on the CPU.

    Args:
        shape: Rows and steps of the whole batch.
    """

    shape: Sequence[int]
    parts: dict[str, dict[tuple[int, ...], Tensor]] = field(default_factory=dict)  # by name, then by shape
    part: dict[str, Tensor] = field(default_factory=dict)  # (N,) by name: index of each row's tensor

    def put(self, rows: Tensor, steps: slice, values: Mapping[str, Tensor]) -> None:
        """Store named values (n rows, t steps, ...) at some rows and steps of the whole batch."""
        for name, value in values.items():
            parts, shape = self.parts.setdefault(name, {}), tuple(value.shape[2:])
            if shape not in parts:  # allocated at first use: absent shapes take no memory
                parts[shape] = value.new_empty((*self.shape, *shape), device="cpu")
            part = parts[shape][:, steps]
            part[rows] = pad_to(value.detach().cpu(), part.shape[1], 1)
            self.part.setdefault(name, torch.zeros(self.shape[0], dtype=torch.int64))[rows] = [*parts].index(
                shape
            )

    def columns(self) -> dict[str, Tensor]:
        """Return the columns by name: a tensor if all values have one shape, otherwise a `Ragged`."""
        every = torch.arange(self.shape[0])
        return {
            # A Ragged can replace a tensor, because users of a column only select rows and steps.
            name: cast(Tensor, Ragged(tuple(parts.values()), self.part[name], every))
            if len(parts) > 1
            else next(iter(parts.values()))
            for name, parts in self.parts.items()
        }
