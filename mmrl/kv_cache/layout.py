"""Where the tokens of a batch are: which are visual, which are padding, which rows share a prompt.

A slot is the number of a column as the model counts them: what its attention mask speaks of. Tokens are held
in another order, so every block comes with the slots of its tokens, below 0 where it holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.kv_cache.blocks import Block


def placeholder_ids(config: Any, kinds: Sequence[str] = ("image", "video")) -> list[int]:
    """List the ids of the tokens that stand for images and videos in a prompt, from a model's config."""
    ids = (getattr(config, f"{kind}_token_id", None) for kind in kinds)
    return sorted({token for token in ids if token is not None})


def find_visual(config: Any, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find visual tokens by the placeholders of a model: ids (P, S) to (visual, mask), (P, S) bool each.

    Without a `mask` nothing is taken for padding.
    """
    known = placeholder_ids(config)
    if not known:
        raise ValueError(
            f"a model of type '{config.model_type}' names no placeholder of pictures or clips, so nothing is "
            "visual; `kivi` and `vl_cache` serve models of text"
        )
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return torch.isin(ids, torch.tensor(known, device=ids.device)) & real, real


def group_slots(flags: Tensor, group: Tensor) -> Tensor:
    """Sort flagged tokens into groups: flags (P, S) bool and group numbers (P, S) to slots (P, E, n), -1
    behind the last token of a group."""
    flags, group = flags.cpu(), group.cpu()
    rows, slots = flags.nonzero(as_tuple=True)
    if not len(rows):
        return torch.full((len(flags), 0, 0), -1)
    number = group[rows, slots]
    key = rows * (int(number.max()) + 1) + number
    place = _ranks(key)
    out = torch.full((len(flags), int(number.max()) + 1, int(place.max()) + 1), -1)
    out[rows, number, place] = slots
    return out


def _ranks(key: Tensor) -> Tensor:
    """Count how many equal keys stand before each."""
    order = key.argsort(stable=True)
    ordered = key[order]
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    at = torch.arange(len(key))
    first = torch.where(starts, at, 0).cummax(0).values
    return torch.empty_like(key).scatter_(0, order, at - first)


@dataclass(frozen=True)
class Part:
    """A block with the slots of its tokens: (R, n), or (R, h, n) where heads hold different ones.

    A shared part has one row for every prompt, another one for every row. Parts of one `name` have the same
    slots in every layer. `visual` says that it holds visual tokens only. Slots of parts that are not shared
    may be (1, n) where all rows have the same.
    """

    block: Block
    slots: Tensor
    shared: bool = True
    visual: bool = False
    name: str = ""

    def rows(self, layout: Layout) -> Tensor:
        """Give every row of the batch its slots."""
        if self.shared:
            return self.slots if layout.alone else self.slots[layout.owner]
        return self.slots.expand(len(layout.owner), *self.slots.shape[1:])

    def dense(self, layout: Layout) -> Tensor:
        """Give every row of the batch its tokens."""
        found = self.block.dense()
        return found if not self.shared or layout.alone else found[layout.owner]


class Layout:
    """The prompts of a batch, and which row reads which. All layers of a cache share one.

    `visual` and `real` are (P, S). Rows that were repeated before the prompt was read hold it once.
    """

    def __init__(self, visual: Tensor | None, real: Tensor | None) -> None:
        self.visual, self.real = visual, real
        self.owner = torch.zeros(0, dtype=torch.int64)
        self.length = 0  # of the prompt, in slots
        self._fold: tuple[Tensor, int, bool] | None = None
        self.made: dict[str, Tensor] = {}  # slots that all layers share
        self._hidden: dict[tuple[str, ...], tuple] = {}
        self._full: dict[str, bool] = {}  # which parts hold a token in every place
        self._alone: bool | None = None

    def begin(self, rows: int, length: int, device: torch.device) -> int:
        """Take up the prompt of the first layer; says how often every prompt is repeated in its rows."""
        known = self.real if self.real is not None else self.visual
        if known is None:
            self.real = torch.ones(rows, length, dtype=torch.bool)
            known = self.real
        if known.shape[1] != length or rows % len(known):
            raise ValueError(
                f"the masks of the cache are for {len(known)} prompts of {known.shape[1]} tokens, but the "
                f"model's first keys are of {rows} rows of {length}; give the masks of these prompts, and "
                "let the model read them in one pass"
            )
        if self.real is None:
            self.real = torch.ones_like(self.visual)
        self.real = self.real.bool()
        self.visual = torch.zeros_like(self.real) if self.visual is None else self.visual.bool() & self.real
        self.length = length
        times = rows // len(known)
        self.owner = torch.arange(len(known), device=device).repeat_interleave(times)
        return times

    @property
    def alone(self) -> bool:
        """Tell whether every prompt has one row, in order."""
        if self._alone is None:
            here = torch.arange(len(self.real), device=self.owner.device)
            self._alone = torch.equal(self.owner, here)
        return self._alone

    def select(self, rows: Tensor) -> Tensor | None:
        """Keep rows, in this order; gives the prompts to be kept where some are not read any more."""
        self.owner = self.owner[rows.to(self.owner.device)]
        self._fold = self._alone = None
        self._forget()
        used, owner = torch.unique(self.owner, return_inverse=True)
        if len(used) == len(self.real):
            return None
        self.owner = owner
        here = used.to(self.real.device)
        self.real, self.visual = self.real[here], self.visual[here]
        return used

    def crop(self, length: int) -> None:
        """Cut prompts to a number of slots."""
        self.length = min(self.length, length)
        self._forget()

    def _forget(self) -> None:
        self._hidden.clear()
        self._full.clear()

    # ---- rows of one prompt as queries of one row

    def fold(self, x: Tensor) -> Tensor:
        """Bring rows of one prompt together: (B, h, Q, D) to (P, h, g * Q, D), g the largest group."""
        place, most, even = self._places()
        if most == 0:
            return x
        if even:
            return x.unflatten(0, (-1, most)).transpose(1, 2).flatten(2, 3)
        out = x.new_zeros(len(self.real), most, *x.shape[1:])
        out[self.owner, place] = x
        return out.transpose(1, 2).flatten(2, 3)

    def unfold(self, x: Tensor) -> Tensor:
        """Give every row its own again: (P, h, g * Q, n) to (B, h, Q, n)."""
        place, most, even = self._places()
        if most == 0:
            return x
        x = x.unflatten(2, (most, -1)).transpose(1, 2)
        return x.flatten(0, 1) if even else x[self.owner, place]

    def _places(self) -> tuple[Tensor, int, bool]:
        """Number the rows of every prompt, find the largest group (0 where nothing is to be brought
        together), and tell whether all groups are as large and in order."""
        if self._fold is None:
            if self.alone:
                self._fold = self.owner, 0, True
            else:
                place = _ranks(self.owner.cpu()).to(self.owner.device)
                most = int(place.max()) + 1
                order = torch.arange(len(self.real), device=self.owner.device).repeat_interleave(most)
                self._fold = place, most, torch.equal(self.owner, order)
        return self._fold

    # ---- what queries may see

    def hidden(
        self, parts: list[Part], mask: Tensor | None, num: int, total: int, heads: tuple[int, int]
    ) -> Tensor | None:
        """Tell which tokens of parts, side by side, the `num` newest queries do not see: None for none, or
        bool that fits scores (P, h, g * Q, N) of rows that were brought together.

        `mask` is the model's: bool or added to scores, the same for all heads or one for each; `heads` are
        those of keys, and how many query heads each of them has. One answer serves all layers whose parts
        have names.
        """
        names = tuple(part.name for part in parts)
        kept = self._hidden.get(names)
        if kept is not None and kept[0] is mask and kept[1] == (num, total):
            return kept[2]
        if mask is None and num == 1 and all(self._is_full(part) for part in parts):
            found = None
        else:
            seen = _visible([per_head(part.rows(self)) for part in parts], mask, num, total, heads)
            found = None if bool(seen.all()) else self._beside_scores(~seen, heads[1])
        if all(names):
            self._hidden[names] = mask, (num, total), found
        return found

    def _is_full(self, part: Part) -> bool:
        """Tell whether no place of a part is empty. A name's answer holds until rows or slots are moved:
        what comes behind is full as well."""
        if part.name not in self._full or not part.name:
            self._full[part.name] = bool((part.slots >= 0).all())
        return self._full[part.name]

    def _beside_scores(self, hidden: Tensor, queries: int) -> Tensor:
        """Bring (B, h or 1, r or 1, num, N) to (P, h or 1, g * Q, N), or to one for all queries."""
        if hidden.shape[3] > 1 or not self.alone:
            hidden = hidden.expand(-1, -1, queries, -1, -1)
        return self.fold(hidden.flatten(2, 3))


def per_head(slots: Tensor) -> Tensor:
    """Give slots (R, n) or (R, h, n) an axis of heads."""
    return slots if slots.dim() == 3 else slots[:, None]


def _visible(
    slots: list[Tensor], mask: Tensor | None, num: int, total: int, heads: tuple[int, int]
) -> Tensor:
    """Tell which slots, each (B, h or 1, n), the newest queries see: (B, h or 1, r or 1, num, N)."""
    many = max(one.shape[1] for one in slots)
    wide = torch.cat([one.expand(-1, many, -1) for one in slots], -1)[:, :, None, None]
    held = wide >= 0
    if mask is None:
        newest = torch.arange(total - num, total, device=wide.device)
        return held & (wide <= newest[:, None])
    if mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    mask = mask[..., :total].expand(len(wide), -1, num, -1)
    mask = mask.unflatten(1, heads) if mask.shape[1] > 1 else mask[:, :, None]
    many = max(many, mask.shape[1])
    where = wide.clamp(min=0).expand(-1, many, mask.shape[2], num, -1)
    return mask.expand(-1, many, -1, -1, -1).gather(-1, where) & held
