"""A cache whose prompts are held once and read by every row that answers them, and the attention that reads
it.

transformers hand keys and values of a cache to an attention that is looked up by name. While prompts are
read, `watched` notes which of these are what the cache holds; where all are, the model computes with nothing
else, and answers may be read with `merged` in its place. Both names stand in the model's config for the call
alone, so whatever else reads or changes it meets the model's own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.kv_cache.attention import Groups, Sight, added, attend_merged, causal_mask

WATCHED, MERGED = "watched_", "merged"
ROOM = 32  # tokens by which the rows' part grows
# What an attention may be asked for that `merged` does not do.
UNUSUAL = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q")
_NOTED: ContextVar[list[Tensor] | None] = ContextVar("noted", default=None)


# ---- while prompts are read


@contextmanager
def watched(config: Any) -> Iterator[list[Tensor]]:
    """Note the keys that the model's attention is given; none where its masks are not of a plain kind."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    base = config.get_text_config(decoder=True)._attn_implementation or "sdpa"
    noted: list[Tensor] = []
    mask = MASKS.get(base)
    if mask not in (MASKS["sdpa"], MASKS["eager"]):
        yield noted
        return
    AttentionInterface.register(WATCHED + base, partial(_watch, base))
    # Without a mask of this name transformers drop the causal and the padding mask.
    AttentionMaskInterface.register(WATCHED + base, mask)
    token = _NOTED.set(noted)
    try:
        with _named(config, WATCHED + base):
            yield noted
    finally:
        _NOTED.reset(token)


@contextmanager
def _named(config: Any, name: str) -> Iterator[None]:
    text = config.get_text_config(decoder=True)
    before = text._attn_implementation
    text._attn_implementation = name
    try:
        yield
    finally:
        text._attn_implementation = before


def _watch(
    base: str, module: nn.Module, query: Tensor, key: Any, value: Any, mask: Any, **others: Any
) -> Any:
    """Attend as `base` does, and note the keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    noted = _NOTED.get()
    if noted is not None and all(others.get(name) is None for name in UNUSUAL):
        noted.append(key)
    # Every file of models has an eager attention of its own.
    own = getattr(inspect.getmodule(type(module)), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(base, own)(module, query, key, value, mask, **others)


def share(held: Any, noted: list[Tensor], mask: Tensor) -> Any | None:
    """Make a cache that shares what a DynamicCache holds of prompts, or None where the model's attention
    read something else. `mask` is (P, S)."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    read = {key.untyped_storage().data_ptr() for key in noted}
    layers = held.layers
    plain = layers and {type(one) for one in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    if not plain or not all(
        one.is_initialized and one.keys.untyped_storage().data_ptr() in read for one in layers
    ):
        return None
    prompts = Prompts(Groups(torch.arange(len(mask), device=mask.device), len(mask)), mask)
    windows = [one.sliding_window if one.is_sliding else 0 for one in layers]
    return _cache_class()(
        [Held(prompts, one.keys, one.values, window) for one, window in zip(layers, windows, strict=True)],
        prompts,
    )


# ---- what is held


class Prompts:
    """Which rows read which prompt, and what of them is padding: (P, S). All layers share one."""

    def __init__(self, groups: Groups, mask: Tensor) -> None:
        self.groups, self.mask = groups, mask
        self.length = mask.shape[1]
        self._padded: bool | None = None
        self._made: dict[Any, Tensor | None] = {}

    def select(self, rows: Tensor) -> Tensor | None:
        """Keep rows, in this order; gives the prompts to be kept where some are not read any more."""
        self.groups, used = self.groups.select(rows)
        if len(used) == len(self.mask):
            return None
        self.mask, self._padded = self.mask[used], None
        self._made.clear()
        return used

    def hidden(self, num: int, length: int, held: int, window: int, like: Tensor) -> Tensor | None:
        """Make what is added to scores of the `num` newest of `length` tokens behind a prompt, of which the
        last `held` are there: (P, 1, 1 or num, held), None where all are seen."""
        reach = length + held if window else 0  # how far the newest query is from the first key
        key = (num, reach if reach > window else 0, held, window, like.dtype)
        if key not in self._made:
            if len(self._made) > 8:
                self._made.clear()
            self._made[key] = self._make(num, length, held, window if reach > window else 0, like)
        return self._made[key]

    def _make(self, num: int, length: int, held: int, window: int, like: Tensor) -> Tensor | None:
        if self._padded is None:
            self._padded = not bool(self.mask.all())
        if not window and not self._padded:
            return None
        hidden = ~self.mask[:, None, None, self.length - held :].bool()
        if window:
            at = torch.arange(length - num, length, device=like.device)[:, None]
            ago = at + held - torch.arange(held, device=like.device)
            hidden = hidden | (ago >= window)
        return added(hidden, like)


class Held:
    """Keys and values of one layer: of prompts (P, h, S, D), and of what rows have read since."""

    def __init__(self, prompts: Prompts, keys: Tensor, values: Tensor, window: int) -> None:
        if torch.is_autocast_enabled(keys.device.type):
            # As attention is computed there; without it queries and keys may differ.
            kind = torch.get_autocast_dtype(keys.device.type)
            keys, values = (x.to(kind) if x.dtype != torch.float64 else x for x in (keys, values))
        self.prompts, self.keys, self.values, self.window = prompts, keys, values, window
        self.length = 0  # tokens behind the prompts
        self.own: tuple[Tensor, Tensor] | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take up tokens (N, h, t, D)."""
        fresh, end = (keys.to(self.keys.dtype), values.to(self.values.dtype)), self.length + keys.shape[2]
        if self.own is None and torch.is_grad_enabled():
            self.own = fresh
        elif torch.is_grad_enabled():
            self.own = tuple(torch.cat([x, y], 2) for x, y in zip(self.pair(), fresh, strict=True))
        else:
            self._write(fresh, end)
        self.length = end

    def _write(self, fresh: tuple[Tensor, Tensor], end: int) -> None:
        """Put tokens into room that grows by a quarter, so that what is there is seldom copied."""
        old = self.own or tuple(x[:, :, :0] for x in fresh)
        if end > old[0].shape[2]:
            room = max(end, self.length + self.length // 4) + ROOM
            self.own = tuple(x.new_empty(*x.shape[:2], room, x.shape[3]) for x in fresh)
            for x, y in zip(self.own, old, strict=True):
                x[:, :, : self.length] = y[:, :, : self.length]
        for x, y in zip(self.own, fresh, strict=True):
            x[:, :, self.length : end] = y

    def pair(self) -> tuple[Tensor, Tensor]:
        """Give what rows have read since: (N, h, T, D) each."""
        return tuple(x[:, :, : self.length] for x in self.own)

    def select(self, rows: Tensor, used: Tensor | None) -> None:
        """Keep rows, in this order; `used` are the prompts that are still read, None for all."""
        if used is not None:
            self.keys, self.values = self.keys[used], self.values[used]
        if self.own is not None:
            self.own = tuple(x[rows] for x in self.own)

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attend from the newest tokens (N, H, t, D) to everything: (N, H, t, D)."""
        num = query.shape[2]
        shared = self.prompts.hidden(num, self.length, self.keys.shape[2], self.window, self.keys)
        narrow = 0 < self.window < self.length
        own = causal_mask(num, self.length, self.keys, self.window) if narrow else None
        sight = Sight(self.prompts.groups, scaling, shared, own)
        return attend_merged(query.to(self.keys.dtype), (self.keys, self.values), self.pair(), sight)


def _read(
    module: nn.Module,
    query: Tensor,
    key: Held,
    value: Held,
    mask: Any,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend to what is held, (N, t, H, D); `mask` is None, because the prompts know their padding."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.attend(query, scaling).transpose(1, 2), None


@contextmanager
def merged(config: Any) -> Iterator[None]:
    """Let a model read answers behind prompts that are held once."""
    from transformers import AttentionInterface

    AttentionInterface.register(MERGED, _read)
    # There is no mask of this name: transformers then make none.
    with _named(config, MERGED):
        yield


@cache
def _cache_class() -> type:
    """Make the class of caches that transformers want. It says nothing of its own: all of it is in `Held`."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class SharedLayer(CacheLayerMixin):
        """One layer."""

        is_sliding = False

        def __init__(self, held: Held) -> None:
            super().__init__()
            self.held, self.is_initialized = held, True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Do nothing: the prompts are there."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple:
            self.held.append(key_states, value_states)
            return self.held, self.held

        def get_seq_length(self) -> int:
            return self.held.prompts.length + self.held.length

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

        def get_max_length(self) -> int:
            return -1

    class SharedCache(Cache):
        """All layers, whose rows move together."""

        def __init__(self, held: list[Held], prompts: Prompts) -> None:
            super().__init__(layers=[SharedLayer(one) for one in held])
            self.prompts = prompts

        def batch_select_indices(self, indices: Tensor) -> None:
            used = self.prompts.select(indices)
            for layer in self.layers:
                layer.held.select(indices, used)

    return SharedCache
