"""KIVI's residual window (arXiv 2402.02750): the newest tokens exact, older ones quantised, row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmrl.kv_cache import quantization
from mmrl.kv_cache.blocks import CodedBlock, ExactBlock
from mmrl.kv_cache.layout import Part


class RaggedRows:
    """Padded tensors (N, h, n, ...) of which row i uses the first `count[i]`, with their slots (N, n)."""

    def __init__(self, tensors: dict[str, Tensor], slots: Tensor, count: Tensor) -> None:
        self.tensors, self.slots, self.count = tensors, slots, count

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and slots, unused room included."""
        return sum(x.numel() * x.element_size() for x in (*self.tensors.values(), self.slots))

    def push(self, rows: Tensor, tensors: dict[str, Tensor], slots: Tensor) -> None:
        """Append items (k, h, e, ...) to some rows (k,)."""
        index = self.count[rows][:, None] + torch.arange(slots.shape[1], device=slots.device)
        more = int(index.max()) + 1 - self.slots.shape[1]
        if more > 0:
            more = max(more, self.slots.shape[1] // 4)
            self.tensors = {name: _longer(x, 2, more) for name, x in self.tensors.items()}
            self.slots = _longer(self.slots, 1, more, -1)
        for name, x in tensors.items():
            # Two index tensors with a slice between them move their own axes to the front.
            self.tensors[name][rows[:, None], :, index] = x.transpose(1, 2)
        self.slots[rows[:, None], index] = slots
        self.count[rows] += slots.shape[1]

    def pop(self, rows: Tensor, num: int) -> tuple[dict[str, Tensor], Tensor]:
        """Remove and return the first `num` items of some rows; later items move up."""
        taken = {name: x[rows, :, :num] for name, x in self.tensors.items()}, self.slots[rows, :num]
        for name, x in self.tensors.items():
            self.tensors[name][rows] = _longer(x[rows, :, num:], 2, num)
        self.slots[rows] = _longer(self.slots[rows, num:], 1, num, -1)
        self.count[rows] -= num
        return taken

    def select(self, rows: Tensor) -> None:
        """Keep rows, in this order."""
        self.tensors = {name: x[rows] for name, x in self.tensors.items()}
        self.slots, self.count = self.slots[rows], self.count[rows]

    def crop(self, length: int) -> None:
        """Drop the tokens from this slot on; a group stays while one of its tokens does."""
        self.slots = self.slots.masked_fill(self.slots >= length, -1)
        newest = self.slots.flatten(2).amax(-1) if self.slots.dim() == 3 else self.slots
        self.count = (newest >= 0).sum(1)


def _longer(x: Tensor, dim: int, more: int, fill: int = 0) -> Tensor:
    return nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, more), value=fill)


class ResidualWindow:
    """The tail of a KIVI cache: the newest tokens exact, older ones quantised once and never again.

    Keys are quantised together when there are `residual` exact ones, in groups of `group` tokens with one
    scale per channel. Values are quantised one by one when there are more than `residual`, with one scale per
    `group` channels.
    """

    def __init__(
        self, nbits: int, value_nbits: int, group: int, residual: int, rule: quantization.Rule, rotate: bool
    ) -> None:
        self.nbits, self.value_nbits, self.group, self.residual = nbits, value_nbits, group, residual
        self.rule, self.rotate = rule, rotate
        self.length = 0

    def start(self, keys: RaggedRows, values: RaggedRows, length: int) -> None:
        """Start with the newest tokens of prompts: tensors (N, h, n, D) named "x"."""
        self.new_keys, self.new_values, self.length = keys, values, length
        x = keys.tensors["x"]
        rows, heads, _, size = x.shape
        self.old_keys = _empty(self.code_keys(x.new_zeros(rows, heads, 1, self.group, size)), self.group)
        self.old_values = _empty(self.code_values(x.new_zeros(rows, heads, 1, size)), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, exact tokens and slots."""
        return sum(x.nbytes for x in (self.new_keys, self.new_values, self.old_keys, self.old_values))

    def code_keys(self, x: Tensor, valid: Tensor | None = None) -> quantization.Codes:
        """Quantise groups of keys (N, h, E, g, D)."""
        return quantization.quantize(self._rotate(x), self.nbits, valid=valid, rule=self.rule)

    def code_values(self, x: Tensor, valid: Tensor | None = None) -> quantization.Codes:
        """Quantise values (N, h, n, D)."""
        return quantization.quantize(
            self._rotate(x), self.value_nbits, valid=valid, rule=self.rule, side="values", channels=self.group
        )

    def _rotate(self, x: Tensor) -> Tensor:
        return x @ quantization.rotation(x.shape[-1], x.dtype, x.device) if self.rotate else x

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens (N, h, t, D).

        Older tokens are quantised first, so that the step that fills the window still reads it exactly.
        """
        self._leave()
        rows = torch.arange(len(keys), device=keys.device)
        slots = torch.arange(self.length, self.length + keys.shape[2], device=keys.device)
        self.new_keys.push(rows, {"x": keys}, slots.expand(len(keys), -1))
        self.new_values.push(rows, {"x": values}, slots.expand(len(keys), -1))
        self.length += keys.shape[2]

    def _leave(self) -> None:
        while len(rows := (self.new_keys.count >= self.residual).nonzero()[:, 0]):
            taken, slots = self.new_keys.pop(rows, self.residual)
            groups = taken["x"].unflatten(2, (-1, self.group))
            self.old_keys.push(rows, _tensors(self.code_keys(groups)), slots.unflatten(1, (-1, self.group)))
        while len(rows := (self.new_values.count > self.residual).nonzero()[:, 0]):
            # RaggedRows differ in how many must leave; those with the fewest set the pace.
            num = int(self.new_values.count[rows].min()) - self.residual
            taken, slots = self.new_values.pop(rows, num)
            self.old_values.push(rows, _tensors(self.code_values(taken["x"])), slots)

    def keys(self) -> list[Part]:
        """List the keys: quantised ones, then exact ones."""
        return [*self._old(self.old_keys, self.nbits, by_token=False), _new(self.new_keys)]

    def values(self) -> list[Part]:
        """List the values: quantised ones, then exact ones."""
        return [*self._old(self.old_values, self.value_nbits, by_token=True), _new(self.new_values)]

    def _old(self, rows: RaggedRows, nbits: int, *, by_token: bool) -> list[Part]:
        if not rows.slots.shape[1]:
            return []
        size = self.new_keys.tensors["x"].shape[-1]
        tensors = {name: x[:, :, None] if by_token else x for name, x in rows.tensors.items()}
        codes = quantization.Codes(**tensors, nbits=nbits, size=size)
        return [Part(CodedBlock(codes, self.rotate), rows.slots.flatten(1), shared=False)]

    def select(self, rows: Tensor) -> None:
        """Keep rows, in this order."""
        for side in (self.new_keys, self.new_values, self.old_keys, self.old_values):
            side.select(rows)

    def crop(self, length: int) -> None:
        """Drop the tokens from this slot on."""
        self.length = length
        for side in (self.new_keys, self.new_values, self.old_keys, self.old_values):
            side.crop(length)


def _new(rows: RaggedRows) -> Part:
    return Part(ExactBlock(rows.tensors["x"]), rows.slots, shared=False)


def _tensors(codes: quantization.Codes) -> dict[str, Tensor]:
    return {"packed": codes.packed, "scale": codes.scale, "low": codes.low}


def _empty(codes: quantization.Codes, group: int) -> RaggedRows:
    """Make empty rows for codes like these, with slots (N, 0, group), or (N, 0) without groups."""
    tensors = {name: x[:, :, :0].contiguous() for name, x in _tensors(codes).items()}
    rows, device = len(codes.packed), codes.packed.device
    slots = torch.full((rows, 0, group) if group else (rows, 0), -1, device=device)
    return RaggedRows(tensors, slots, torch.zeros(rows, dtype=torch.int64, device=device))
