"""Keys and values of tokens after a prompt: exact, or in KIVI's residual window (arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from mmrl.kv_cache.blocks import CodedBlock, ExactBlock
from mmrl.kv_cache.layout import Part
from mmrl.kv_cache.quantization import Codes, Rule, quantize, rotate

ROOM = 16  # the buffers of a tail grow by multiples of this number of tokens


def room_of(tokens: int) -> int:
    """Return how many slots a `GrowingTail` has allocated after appending `tokens` tokens one by one."""
    room = 0
    while room < tokens:
        room = _grown(room, room + 1)
    return room


def _grown(used: int, end: int) -> int:
    return -(-max(end, used + used // 4) // ROOM) * ROOM  # rounded up


class GrowingTail:
    """Exact keys and values of the tokens that rows append to their prompt.

    The first token has slot `start`, the newest token has slot `length` - 1.
    """

    def __init__(self, start: int) -> None:
        self.start = self.length = start
        self._buffers: tuple[Tensor, Tensor] | None = None  # (rows, heads, room, channels) each

    @property
    def nbytes(self) -> int:
        """Memory of the buffers in bytes, unused room included."""
        return sum(x.nbytes for x in self._buffers or ())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append keys and values (rows, heads, tokens, channels).

        With gradients enabled the tensors are concatenated, because writing into a buffer would change
        tensors that the backward pass needs. Otherwise they are written into buffers that grow by a quarter,
        so that older tokens are rarely copied.
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
        """Return the stored keys and values, (rows, heads, tokens, channels) each."""
        return tuple(x.narrow(2, 0, self.length - self.start) for x in self._buffers)

    def fill(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replace all tokens by the (keys, values) of every row, padded on the left."""
        # Fill empty entries with 0: their attention weight is 0, but 0 * NaN is NaN.
        self._buffers = tuple(pad_tokens(side) for side in zip(*rows, strict=True))
        self.length = self.start + self._buffers[0].shape[2]

    def parts(self) -> tuple[list[Part], list[Part]]:
        """Return the keys and the values, as lists of one part; empty before the first token."""
        if self._buffers is None:
            return [], []
        keys, values = self.tensors()
        slots = slot_range(self.start, self.length, keys.device)
        return tuple([Part(ExactBlock(x), slots, shared=False, name="tail")] for x in (keys, values))

    def select(self, rows: Tensor) -> None:
        """Select rows by index."""
        if self._buffers is not None:
            self._buffers = tuple(x[rows] for x in self._buffers)


@lru_cache(maxsize=4)
def slot_range(start: int, end: int, device: torch.device) -> Tensor:
    """Return the slots from `start` to `end` (1, n), cached because all layers of a step need the same."""
    return torch.arange(start, end, device=device)[None]


def pad_tokens(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors (heads, n, channels) of different n into one tensor, with zeros on the left."""
    longest = max(x.shape[1] for x in rows)
    return torch.stack([nn.functional.pad(x, (0, 0, longest - x.shape[1], 0)) for x in rows])


class RaggedRows:
    """Rows of different lengths: tensors (rows, heads, n, ...); row i uses the first `count[i]` items.

    An item is one token, with `slots` (rows, n), or a group of g tokens, with `slots` (rows, n, g). Empty
    slots are -1.
    """

    def __init__(self, tensors: dict[str, Tensor], slots: Tensor, count: Tensor) -> None:
        self.tensors, self.slots, self.count = tensors, slots, count

    @property
    def nbytes(self) -> int:
        """Memory of tensors and slots in bytes, unused room included."""
        return sum(x.nbytes for x in (*self.tensors.values(), self.slots))

    def push(self, rows: Tensor, tensors: dict[str, Tensor], slots: Tensor) -> None:
        """Append items (k, heads, items, ...) and their slots to the `k` rows with the indices `rows`."""
        index = self.count[rows][:, None] + torch.arange(slots.shape[1], device=slots.device)  # (rows, items)
        more = int(index.max()) + 1 - self.slots.shape[1]
        if more > 0:
            more = max(more, self.slots.shape[1] // 4)  # grow by a quarter, so that items are rarely copied
            self.tensors = {name: lengthen(x, 2, more) for name, x in self.tensors.items()}
            self.slots = lengthen(self.slots, 1, more, -1)
        for name, x in tensors.items():
            # The axes of both index tensors move to the front, because a slice is between them.
            self.tensors[name][rows[:, None], :, index] = x.transpose(1, 2)
        self.slots[rows[:, None], index] = slots
        self.count[rows] += slots.shape[1]

    def pop(self, rows: Tensor, num: int) -> tuple[dict[str, Tensor], Tensor]:
        """Remove and return the first `num` items of the given rows; later items move forward."""
        removed = {name: x[rows, :, :num] for name, x in self.tensors.items()}, self.slots[rows, :num]
        for name, x in self.tensors.items():
            self.tensors[name][rows] = lengthen(x[rows, :, num:], 2, num)
        self.slots[rows] = lengthen(self.slots[rows, num:], 1, num, -1)
        self.count[rows] -= num
        return removed

    def select(self, rows: Tensor) -> None:
        """Select rows by index."""
        self.tensors = {name: x[rows] for name, x in self.tensors.items()}
        self.slots, self.count = self.slots[rows], self.count[rows]


def lengthen(x: Tensor, dim: int, more: int, fill: int = 0) -> Tensor:
    """Append `more` entries with value `fill` to a dimension."""
    # torch lists pads (before, after) from the last dimension to the first.
    return nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, more), value=fill)


@dataclass(frozen=True, kw_only=True)
class KiviCodec:
    """KIVI's quantisers: one scale per channel and token group (keys), per token and channel group (values).

    The options are documented by the cache `kivi`.
    """

    nbits: int
    value_nbits: int
    q_group_size: int
    residual_length: int
    rule: Rule
    rotated: bool

    def code_keys(self, x: Tensor, valid: Tensor | None = None) -> Codes:
        """Quantise groups of keys (rows, heads, groups, g, channels); a group shares a scale per channel."""
        # Scales per channel, because outliers of keys are in a few channels.
        return quantize(rotate(x) if self.rotated else x, self.nbits, valid=valid, rule=self.rule)

    def code_values(self, x: Tensor, valid: Tensor | None = None) -> Codes:
        """Quantise values (rows, heads, tokens, channels)."""
        x, channels = rotate(x) if self.rotated else x, self.q_group_size
        return quantize(x, self.value_nbits, valid=valid, rule=self.rule, side="values", channels=channels)

    def key_block(self, codes: Codes) -> CodedBlock:
        """Create a block of quantised keys."""
        return CodedBlock(codes, self.rotated)

    def value_block(self, codes: Codes) -> CodedBlock:
        """Create a block of quantised values, as one group, because every token has its own scales."""
        return CodedBlock(codes.map(lambda x: x[:, :, None]), self.rotated)  # (rows, heads, 1, tokens, ...)


class ResidualWindow:
    """The tail of a KIVI cache: the newest tokens are exact, older tokens are quantised once.

    `residual_length` keys are quantised together, in groups of tokens, as soon as that many are exact. Values
    are quantised one by one when more than `residual_length` are exact. `keys` and `values` contain the
    newest tokens of prompts, in tensors (rows, heads, n, channels) named "x".
    """

    def __init__(self, codec: KiviCodec, keys: RaggedRows, values: RaggedRows, length: int) -> None:
        self.codec, self.new_keys, self.new_values, self.length = codec, keys, values, length
        x, group = keys.tensors["x"], codec.q_group_size
        rows, heads, _, size = x.shape
        count, slots = torch.zeros_like(keys.count), keys.slots.new_full((rows, 0, group), -1)
        # Quantise one dummy item, as template for the shapes and dtypes of later codes.
        self.key_codes = codec.code_keys(x.new_zeros(rows, heads, 1, group, size))
        self.value_codes = codec.code_values(x.new_zeros(rows, heads, 1, size))
        empty = [
            {name: x[:, :, :0].contiguous() for name, x in codes.tensors.items()}
            for codes in (self.key_codes, self.value_codes)
        ]
        self.old_keys = RaggedRows(empty[0], slots, count)
        self.old_values = RaggedRows(empty[1], slots[..., 0], count.clone())  # an item: one token

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales, exact tokens and slots in bytes."""
        return sum(x.nbytes for x in self._sides())

    def _sides(self) -> tuple[RaggedRows, ...]:
        return self.new_keys, self.new_values, self.old_keys, self.old_values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append keys and values (rows, heads, tokens, channels).

        A full window is quantised before new tokens are added. So the step whose tokens fill the window still
        reads all of them at full precision.
        """
        codec, residual = self.codec, self.codec.residual_length
        # Loops, because many tokens appended at once may fill several windows.
        while len(rows := (self.new_keys.count >= residual).nonzero()[:, 0]):
            oldest, slots = self.new_keys.pop(rows, residual)
            codes = codec.code_keys(oldest["x"].unflatten(2, (-1, codec.q_group_size)))
            self.old_keys.push(rows, codes.tensors, slots.unflatten(1, (-1, codec.q_group_size)))
        while len(rows := (self.new_values.count > residual).nonzero()[:, 0]):
            # Rows have different numbers of surplus tokens; each round removes the smallest number from all.
            oldest, slots = self.new_values.pop(rows, int(self.new_values.count[rows].min()) - residual)
            self.old_values.push(rows, codec.code_values(oldest["x"]).tensors, slots)
        rows = torch.arange(len(keys), device=keys.device)
        slots = torch.arange(self.length, self.length + keys.shape[2], device=keys.device)
        for side, x in ((self.new_keys, keys), (self.new_values, values)):
            side.push(rows, {"x": x}, slots.expand(len(x), -1))
        self.length += keys.shape[2]

    def parts(self) -> tuple[list[Part], list[Part]]:
        """Return the parts of keys and of values: first quantised tokens, then exact tokens."""
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
