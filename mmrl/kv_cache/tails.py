"""The tokens that rows read after their prompt: exact, or in KIVI's residual window (arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from mmrl.kv_cache.blocks import CodedBlock, ExactBlock
from mmrl.kv_cache.layout import Part
from mmrl.kv_cache.quantization import Codes, Rule, quantize, rotate

ROOM = 16  # tokens; the buffers of a tail grow by multiples of it


def room_of(tokens: int) -> int:
    """Compute the slots that a tail has allocated after as many tokens, one at a time."""
    room = 0
    while room < tokens:
        room = _grown(room, room + 1)
    return room


def _grown(used: int, end: int) -> int:
    return -(-max(end, used + used // 4) // ROOM) * ROOM  # rounded up


class GrowingTail:
    """Exact keys and values of the tokens that rows read after their prompt, from slot `start` on.

    A tail has `length` slots up to its newest token, lists its `keys` and `values` as parts with one row per
    batch row, and changes by `append`, `select` and `crop`.
    """

    def __init__(self, start: int) -> None:
        self.start = self.length = start
        self._buffers: tuple[Tensor, Tensor] | None = None  # (N, h, room, D) each

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, unused room included."""
        return sum(x.nbytes for x in self._buffers or ())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens (N, h, t, D).

        With gradients enabled the tensors are concatenated, because writing into a buffer would change
        tensors that the backward pass needs. Without, they go into buffers that grow by a quarter, so that
        older tokens are rarely copied.
        """
        fresh, used = (keys, values), self.length - self.start
        end = used + keys.shape[2]
        self.length += keys.shape[2]
        if torch.is_grad_enabled():
            older = tuple(x.narrow(2, 0, used) for x in self._buffers) if used else ()
            self._buffers = tuple(torch.cat(x, 2) for x in zip(older, fresh, strict=True)) if used else fresh
            return
        if self._buffers is None or end > self._buffers[0].shape[2]:
            room = _grown(used, end)
            grown = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in fresh)
            if used:
                for new, old in zip(grown, self._buffers, strict=True):
                    new.narrow(2, 0, used).copy_(old.narrow(2, 0, used))
            self._buffers = grown
        for buffer, x in zip(self._buffers, fresh, strict=True):
            buffer.narrow(2, used, end - used).copy_(x)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values, (N, h, T, D) each."""
        return tuple(x.narrow(2, 0, self.length - self.start) for x in self._buffers)

    def fill(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replace the tokens by keys and values (h, n, D) of every row, which end in the same slot."""
        longest = max(keys.shape[1] for keys, _ in rows)
        buffers = []
        for side in zip(*rows, strict=True):
            heads, _, size = side[0].shape
            # 0 in empty places: their weights are 0, and 0 * NaN is NaN.
            buffers.append(side[0].new_zeros(len(side), heads, longest, size))
            for out, x in zip(buffers[-1], side, strict=True):
                out[:, longest - x.shape[1] :] = x
        self.length, self._buffers = self.start + longest, tuple(buffers)

    def parts(self) -> tuple[list[Part], list[Part]]:
        """List the keys, and the values, as one part each; none before the first token."""
        if self._buffers is None:
            return [], []
        keys, values = self.tensors()
        slots = slot_range(self.start, self.length, keys.device)
        return tuple([Part(ExactBlock(x), slots, shared=False, name="tail")] for x in (keys, values))

    def select(self, rows: Tensor) -> None:
        """Keep rows, in this order."""
        if self._buffers is not None:
            self._buffers = tuple(x[rows] for x in self._buffers)

    def crop(self, length: int) -> None:
        """Drop the tokens from this slot on."""
        self.start, self.length = min(self.start, length), min(self.length, length)  # even into the prompt


@lru_cache(maxsize=4)
def slot_range(start: int, end: int, device: torch.device) -> Tensor:
    """Number slots (1, n); all layers ask for the same range in a step."""
    return torch.arange(start, end, device=device)[None]


class RaggedRows:
    """Padded tensors (N, h, n, ...) of which row i uses the first `count[i]`, with their slots (N, n).

    An item is a token, or a group of `g` tokens, whose slots are (N, n, g). Slots without a token are -1.
    """

    def __init__(self, tensors: dict[str, Tensor], slots: Tensor, count: Tensor) -> None:
        self.tensors, self.slots, self.count = tensors, slots, count

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and slots, unused room included."""
        return sum(x.nbytes for x in (*self.tensors.values(), self.slots))

    def push(self, rows: Tensor, tensors: dict[str, Tensor], slots: Tensor) -> None:
        """Append items (k, h, e, ...) to some rows (k,)."""
        index = self.count[rows][:, None] + torch.arange(slots.shape[1], device=slots.device)  # (k, e)
        more = int(index.max()) + 1 - self.slots.shape[1]
        if more > 0:
            more = max(more, self.slots.shape[1] // 4)  # grows by a share, so that items are rarely copied
            self.tensors = {name: lengthen(x, 2, more) for name, x in self.tensors.items()}
            self.slots = lengthen(self.slots, 1, more, -1)
        for name, x in tensors.items():
            # Two index tensors with a slice between them move their own axes to the front.
            self.tensors[name][rows[:, None], :, index] = x.transpose(1, 2)
        self.slots[rows[:, None], index] = slots
        self.count[rows] += slots.shape[1]

    def pop(self, rows: Tensor, num: int) -> tuple[dict[str, Tensor], Tensor]:
        """Remove and return the first `num` items of some rows; later items move up."""
        taken = {name: x[rows, :, :num] for name, x in self.tensors.items()}, self.slots[rows, :num]
        for name, x in self.tensors.items():
            self.tensors[name][rows] = lengthen(x[rows, :, num:], 2, num)
        self.slots[rows] = lengthen(self.slots[rows, num:], 1, num, -1)  # the width stays
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
        self.count = (newest >= 0).sum(1)  # items are in the order of slots, so those that leave are last


def lengthen(x: Tensor, dim: int, more: int, fill: int = 0) -> Tensor:
    """Pad a dimension at its end by `more`."""
    # torch lists pads (before, after) from the last dimension to the first.
    return nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, more), value=fill)


@dataclass(frozen=True, kw_only=True)
class KiviCodec:
    """Options of KIVI; keys have one scale per channel and group of tokens, values several per token."""

    nbits: int
    value_nbits: int
    q_group_size: int
    residual_length: int
    rule: Rule
    rotated: bool

    def code_keys(self, x: Tensor, valid: Tensor | None = None) -> Codes:
        """Quantise groups of keys (N, h, E, g, D)."""
        # A channel's scale is that of axis -2, the g tokens, since outliers of keys stay in few channels.
        return quantize(rotate(x) if self.rotated else x, self.nbits, valid=valid, rule=self.rule)

    def code_values(self, x: Tensor, valid: Tensor | None = None) -> Codes:
        """Quantise values (N, h, n, D)."""
        x, channels = rotate(x) if self.rotated else x, self.q_group_size
        return quantize(x, self.value_nbits, valid=valid, rule=self.rule, side="values", channels=channels)

    def key_block(self, codes: Codes) -> CodedBlock:
        """Make a block of coded keys."""
        return CodedBlock(codes, self.rotated)

    def value_block(self, codes: Codes) -> CodedBlock:
        """Make a block of coded values, whose tokens are one group, because each has scales of its own."""
        return CodedBlock(codes.map(lambda x: x[:, :, None]), self.rotated)  # (N, h, 1, n, ...)


class ResidualWindow:
    """The tail of a KIVI cache: the newest tokens exact, older ones quantised once and never again.

    Keys are quantised together when there are `residual_length` exact ones, in groups of tokens. Values are
    quantised one by one when there are more than `residual_length`. Starts with the newest tokens of prompts:
    tensors (N, h, n, D) named "x".
    """

    def __init__(self, codec: KiviCodec, keys: RaggedRows, values: RaggedRows, length: int) -> None:
        self.codec, self.new_keys, self.new_values, self.length = codec, keys, values, length
        x, group = keys.tensors["x"], codec.q_group_size
        rows, heads, _, size = x.shape
        count, slots = torch.zeros_like(keys.count), keys.slots.new_full((rows, 0, group), -1)
        # Codes of one item, as patterns of what leaves the window; none is stored yet.
        self.key_codes = codec.code_keys(x.new_zeros(rows, heads, 1, group, size))
        self.value_codes = codec.code_values(x.new_zeros(rows, heads, 1, size))
        empty = [
            {name: x[:, :, :0].contiguous() for name, x in codes.tensors.items()}
            for codes in (self.key_codes, self.value_codes)
        ]
        self.old_keys = RaggedRows(empty[0], slots, count)
        self.old_values = RaggedRows(empty[1], slots[..., 0], count.clone())  # slots of tokens, not of groups

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, exact tokens and slots."""
        return sum(x.nbytes for x in self._sides())

    def _sides(self) -> tuple[RaggedRows, ...]:
        return self.new_keys, self.new_values, self.old_keys, self.old_values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens (N, h, t, D).

        Older tokens are quantised first, so that the step that fills the window still reads it exactly.
        """
        codec, residual = self.codec, self.codec.residual_length
        # Loops, because after an append of many tokens a row may hold several windows.
        while len(rows := (self.new_keys.count >= residual).nonzero()[:, 0]):
            taken, slots = self.new_keys.pop(rows, residual)
            codes = codec.code_keys(taken["x"].unflatten(2, (-1, codec.q_group_size)))  # (k, h, E, g, D)
            self.old_keys.push(rows, codes.tensors, slots.unflatten(1, (-1, codec.q_group_size)))
        while len(rows := (self.new_values.count > residual).nonzero()[:, 0]):
            # Rows differ in how many must leave; those with the fewest set the pace.
            taken, slots = self.new_values.pop(rows, int(self.new_values.count[rows].min()) - residual)
            self.old_values.push(rows, codec.code_values(taken["x"]).tensors, slots)
        rows = torch.arange(len(keys), device=keys.device)
        slots = torch.arange(self.length, self.length + keys.shape[2], device=keys.device)
        for side, x in ((self.new_keys, keys), (self.new_values, values)):
            side.push(rows, {"x": x}, slots.expand(len(x), -1))
        self.length += keys.shape[2]

    def parts(self) -> tuple[list[Part], list[Part]]:
        """List the keys, and the values: quantised ones, then exact ones."""
        sides = [], []
        if self.old_keys.slots.shape[1]:
            block = self.codec.key_block(replace(self.key_codes, **self.old_keys.tensors))
            sides[0].append(Part(block, self.old_keys.slots.flatten(1), shared=False))
        if self.old_values.slots.shape[1]:
            block = self.codec.value_block(replace(self.value_codes, **self.old_values.tensors))
            sides[1].append(Part(block, self.old_values.slots, shared=False))
        for parts, new in zip(sides, (self.new_keys, self.new_values), strict=True):
            parts.append(Part(ExactBlock(new.tensors["x"]), new.slots, shared=False))
        return sides

    def select(self, rows: Tensor) -> None:
        for side in self._sides():
            side.select(rows)

    def crop(self, length: int) -> None:
        self.length = length
        for side in self._sides():
            side.crop(length)
