"""Layout of a batch of prompts: visual tokens, padding, and the rows that share a prompt.

A slot is the index of a token in the order of the model's attention mask. Caches store tokens in another
order, so every block comes with the slots of its tokens; -1 marks an empty entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.modalities import MODALITIES
from mmrl.kv_cache.attention import additive_mask
from mmrl.kv_cache.blocks import Block, per_head
from mmrl.kv_cache.row_groups import RowGroups


def placeholders(config: Any) -> dict[str, int]:
    """Map each kind of media to its placeholder token id in the config of a model."""
    ids = {kind: getattr(config, f"{kind}_token_id", None) for kind in MODALITIES}
    return {kind: token for kind, token in ids.items() if token is not None}


def placeholder_ids(config: Any) -> list[int]:
    """List the distinct placeholder token ids in the config of a model."""
    return sorted(set(placeholders(config).values()))


def media_ids(config: Any) -> list[int]:
    """List the ids of a model's placeholder tokens and of the tokens that surround media."""
    names = {name for modality in MODALITIES.values() for name in modality.borders}
    borders = {token for name in names if (token := getattr(config, name, None)) is not None}
    return sorted({*placeholder_ids(config), *borders})


def find_visual(config: Any, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return bool masks (visual, not padding) for the token ids of prompts, (prompts, tokens) each.

    Without a `mask` no token counts as padding.
    """
    media_tokens = placeholder_ids(config)
    if not media_tokens:
        raise ValueError(
            f"the config of a model of type '{config.model_type}' has no placeholder token of images or "
            "videos, so no token is visual; use `kivi` or `vl_cache` with models of text"
        )
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return torch.isin(ids, torch.tensor(media_tokens, device=ids.device)) & real, real


@dataclass(frozen=True)
class Part:
    """Stored tokens with their slots: (rows, n), or (rows, heads, n) if heads store different tokens.

    A `shared` part has one row per prompt. Any other part has one row per row of the batch; its slots are
    (1, n) if they are equal for all rows. Parts with the same `name` have the same slots in every layer;
    without a name slots may differ. `visual` marks parts that store visual tokens only.
    """

    block: Block
    slots: Tensor
    shared: bool = True
    visual: bool = False
    name: str = ""

    def row_slots(self, groups: RowGroups) -> Tensor:
        """Expand the slots to the rows of the batch: (rows, n) or (rows, heads, n)."""
        if self.shared:
            return self.slots if groups.alone else self.slots[groups.owner]
        return self.slots.expand(len(groups.owner), *self.slots.shape[1:])

    def dense(self, groups: RowGroups) -> Tensor:
        """Return the dequantised tokens for each row of the batch: (rows, heads, n, channels)."""
        tokens = self.block.dense()
        return tokens if not self.shared or groups.alone else tokens[groups.owner]


class PromptLayout:
    """Visual tokens, padding and rows of a batch of prompts, shared by all cache layers.

    `visual` and `real` (not padding) are masks (prompts, tokens). A repeated prompt is stored once.
    """

    def __init__(self, visual: Tensor | None, real: Tensor | None) -> None:
        self.visual, self.real = visual, real
        self.groups = RowGroups(torch.zeros(0, dtype=torch.int64), 0)
        self.length = 0  # number of slots of the prompt
        self.pad: Tensor | None = None  # (rows,) number of empty slots before a row's own tokens; None: 0
        self.slots: dict[str, Tensor] = {}  # slots chosen by the recipe, for all layers
        self._hidden: dict[tuple, Any] = {}  # cached masks of the current step
        self._full: dict[str, bool] = {}  # whether the parts with this name have no empty entry

    def begin(self, rows: int, length: int, device: torch.device) -> int:
        """Set up masks and row groups from the shape of the first layer; return the rows per prompt."""
        mask = self.real if self.real is not None else self.visual
        mask = torch.ones(rows, length, dtype=torch.bool) if mask is None else mask
        if mask.shape[1] != length or rows % len(mask):
            raise ValueError(
                f"the masks of the cache are for {len(mask)} prompts of {mask.shape[1]} tokens, but the "
                f"model's first keys are of {rows} rows of {length}; give the masks of these prompts, and "
                "let the model read them in one pass"
            )
        self.real = torch.ones_like(mask, dtype=torch.bool) if self.real is None else self.real.bool()
        self.visual = torch.zeros_like(self.real) if self.visual is None else self.visual.bool() & self.real
        self.length = length
        repeats = rows // len(mask)
        owner = torch.arange(len(mask), device=device).repeat_interleave(repeats)
        self.groups = RowGroups(owner, len(mask))
        return repeats

    def select(self, rows: Tensor) -> Tensor | None:
        """Select rows by index; return the prompts that still have rows, or None if all prompts do."""
        self.groups, used = self.groups.select(rows)
        self._hidden, self._full = {}, {}
        self.pad = None if self.pad is None else self.pad[rows]
        if used is not None:
            prompts = used.to(self.real.device)
            self.real, self.visual = self.real[prompts], self.visual[prompts]
        return used

    def prefix_mask(self, num: int, length: int, stored: int, window: int, like: Tensor) -> Tensor | None:
        """Create the additive mask of the prompts' last `stored` tokens: (prompts, 1, 1 or num, stored).

        The queries are the `num` newest of `length` tokens after the prompt. `window` is the size of a
        sliding window, 0 for full attention. Returns None if everything is visible.
        """
        window = window if length + stored > window else 0  # 0: no key is outside the window yet
        key = (num, length if window else 0, stored, window, like.dtype)
        if key not in self._hidden:
            if len(self._hidden) > 8:
                self._hidden.clear()
            if "padding" not in self._full:
                self._full["padding"] = bool(self.real.all())
            hidden = ~self.real[:, None, None, self.length - stored :]
            if window:
                newest = torch.arange(length - num, length, device=like.device)[:, None]
                # Distance of key j to the first token after the prompt: `stored - j` tokens.
                hidden = hidden | (newest + stored - torch.arange(stored, device=like.device) >= window)
            visible = self._full["padding"] and not window
            self._hidden[key] = None if visible else additive_mask(hidden, like)
        return self._hidden[key]

    def padded_masks(
        self, num: int, length: int, stored: int, window: int, repeats: int, like: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Create the additive masks of prompts and of own tokens, for own tokens padded on the left by `pad`.

        The queries are the `num` newest of `length` own slots. The first mask, over the prompts' last
        `stored` tokens, is (prompts, 1, 1 or folded queries, stored) for queries in the order of
        `RowGroups.fold`, or None. The second mask, over own tokens, is (rows, 1, 1 or num, length).
        """
        key = ("padded", num, length, stored, window, repeats, like.dtype)
        if key not in self._hidden:
            self._hidden.clear()  # drop the masks of earlier steps
            pad = self.pad[:, None, None, None]
            slots = torch.arange(length, device=like.device)
            hidden, prefix = slots < pad, self.prefix_mask(num, length, stored, 0, like)
            if window:
                newest = torch.arange(length - num, length, device=like.device)[:, None]
                hidden = hidden | (newest - slots >= window)
                # Distance of key j to the row's first own token, in slot `pad`: `stored - j` tokens.
                far = newest - pad + stored - torch.arange(stored, device=like.device) >= window
                far = far | ~self.real[self.groups.owner][:, None, None, self.length - stored :]
                prefix = self.groups.fold(additive_mask(far, like).repeat(1, 1, repeats, 1))
            self._hidden[key] = prefix, additive_mask(hidden, like)
        return self._hidden[key]

    def hidden(
        self, parts: list[Part], mask: Tensor | None, num: int, total: int, heads: tuple[int, int]
    ) -> Tensor | None:
        """Return a mask of the stored tokens that the `num` newest of `total` tokens must not attend to.

        `mask` is the model's mask, bool or additive, for all heads or per head. `heads` are the number of
        key-value heads and the number of query heads per key-value head. Returns a bool mask that broadcasts
        to folded scores (`RowGroups.fold`), or None if everything is visible. The result is cached for all
        layers whose parts have the same names.
        """
        names = tuple(part.name for part in parts)
        cached = self._hidden.get(names)
        if cached is not None and cached[0] is mask and cached[1] == (num, total):
            return cached[2]
        if mask is None and num == 1 and all(self._is_full(part) for part in parts):
            hidden = None
        else:
            slots = [per_head(part.row_slots(self.groups)) for part in parts]
            seen = visible_slots(slots, mask, num, total, heads)
            hidden = None if bool(seen.all()) else ~seen
        if hidden is not None:
            # (rows, key heads or 1, r or 1, num, n); the r query heads of a key head share a product.
            if num > 1 or not self.groups.alone:
                hidden = hidden.expand(-1, -1, heads[1], -1, -1)
            hidden = self.groups.fold(hidden.flatten(2, 3))
        if all(names):
            self._hidden[names] = mask, (num, total), hidden
        return hidden

    def _is_full(self, part: Part) -> bool:
        # Cached until rows or slots change: appended tokens leave no entry empty.
        if part.name not in self._full or not part.name:
            self._full[part.name] = bool((part.slots >= 0).all())
        return self._full[part.name]


def visible_slots(
    slots: list[Tensor], mask: Tensor | None, num: int, total: int, heads: tuple[int, int]
) -> Tensor:
    """Return a mask of the slots (rows, heads or 1, n) that the `num` newest of `total` tokens attend to."""
    wide_heads = max(x.shape[1] for x in slots)
    wide = torch.cat([x.expand(-1, wide_heads, -1) for x in slots], -1)[:, :, None, None]
    stored = wide >= 0
    if mask is None:
        newest = torch.arange(total - num, total, device=wide.device)
        return stored & (wide <= newest[:, None])
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2  # additive: 0 if visible, the lowest number if hidden
    mask = mask[..., :total].expand(len(wide), -1, num, -1)
    # A mask per query head is (rows, key heads, r, num, total), any other mask (rows, 1, 1, num, total).
    mask = mask.unflatten(1, heads) if mask.shape[1] > 1 else mask[:, :, None]
    wide_heads = max(wide_heads, mask.shape[1])
    index = wide.clamp(min=0).expand(-1, wide_heads, mask.shape[2], num, -1)
    return mask.expand(-1, wide_heads, -1, -1, -1).gather(-1, index) & stored
