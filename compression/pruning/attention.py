"""Attention of one pruned layer: text rows over all heads, visual rows over the heads that they keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.compression.pruning.local_attention import attend_near, near_mask
from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.sliced_linear import FeatureIndex, feature_index
from mmrl.compression.pruning.spec import PruningSpec
from mmrl.compression.pruning.token_stages import TokenStage


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """Query heads kept and lost for visual tokens, and the key heads that the kept ones read (GQA)."""

    kept: tuple[int, ...] | None
    lost: tuple[int, ...]
    needed: tuple[int, ...] | None
    group: int

    def columns(self, size: int) -> FeatureIndex:
        """Return the inputs of the output projection that belong to kept heads."""
        return feature_index(self.kept, size)


@lru_cache(maxsize=1024)
def split_heads(kept: tuple[int, ...] | None, heads: int, kv_heads: int) -> HeadSplit:
    """Split the query heads of a layer into kept and lost ones; None keeps all."""
    group = heads // kv_heads
    if kept is None or len(kept) == heads:
        return HeadSplit(None, (), None, group)
    lost = tuple(h for h in range(heads) if h not in kept)
    needed = tuple(sorted({h // group for h in kept}))
    return HeadSplit(kept, lost, None if len(needed) == kv_heads else needed, group)


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention inputs of one layer, and how they are computed.

    Queries `q` of text (B, H, n_t, D), keys `k` and values `v` of all columns (B, Hkv, C, D), and `rows`:
    queries (None if the layer is frozen), keys and values of visual rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: tuple[Tensor | None, Tensor, Tensor] | None  # queries, keys and values of visual rows
    stage: TokenStage
    split: HeadSplit
    pruning: PruningSpec
    scale: float
    module: nn.Module

    def attend(self) -> tuple[Tensor, Tensor | None]:
        """Compute attention of text rows over all heads, and of visual rows over the kept heads."""
        stage, split = self.stage, self.split
        if not torch.is_tensor(self.k):
            return self._attend_quantised_cache(), None
        if self.rows is None or self.rows[0] is None:
            if not split.lost or not stage.any_visual:
                return self._text(self.q, None), None
            return self._with_text_only_heads(self._text(*self._queries(split.kept))), None
        if self.pruning.radius is None:
            words, seen = self._dense()
        else:
            words = self._text(*self._queries(split.kept))
            seen = self._near()
        return self._with_text_only_heads(words) if split.lost else words, seen

    def _attend_quantised_cache(self) -> Tensor:
        """Attend to a quantised cache by the attention function that it registered: (B, H, n_t, D)."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.rows is not None:
            raise ValueError(
                "images after the first call need keys and values as tensors; set `fused: false` of the "
                "cache. A cache that selects tokens during the prefill (`vl_cache`) "
                "does not fit a model whose visual tokens are pruned"
            )
        read = ALL_ATTENTION_FUNCTIONS[self.module.config._attn_implementation]
        mask, stage = self.stage.text_mask, self.stage
        if self.split.lost and stage.any_visual:
            mask = stage.once(("heads", self.split.lost), self._mask_of_heads)
        out, _ = read(self.module, self.q, self.k, self.v, mask, scaling=self.scale, dropout=0.0)
        return out.transpose(1, 2)

    def _mask_of_heads(self) -> Tensor:
        """Compute the attention mask of text rows per head: (B, H, n_t, C)."""
        lost = torch.zeros(self.q.shape[1], dtype=torch.bool, device=self.q.device)
        lost[list(self.split.lost)] = True
        return torch.where(lost[:, None, None], self.stage.text_only_mask, self.stage.mask(self.stage.text))

    def _queries(self, chosen: tuple[int, ...] | None) -> tuple[Tensor, tuple[int, ...] | None]:
        return self.q if chosen is None else _heads(self.q, chosen), chosen

    def _text(self, q: Tensor, chosen: tuple[int, ...] | None) -> Tensor:
        if not q.shape[1]:
            return q
        mask = self.stage.text_mask
        mask = mask if mask is None else self.stage.bias("text", lambda: self.stage.text_mask, q.dtype)
        if self.stage.plain and self.stage.all_text and mask is not None:
            return F.scaled_dot_product_attention(q, *self._keys(chosen), is_causal=True, scale=self.scale)
        if chosen is None and q.shape[2] == 1 and self.split.group > 1:
            # One query per head: the heads of a group become rows over its one key head, so that keys are not
            # repeated. (B, H, 1, D) to (B, Hkv, group, D).
            packed = q.unflatten(1, (-1, self.split.group))[:, :, :, 0]
            out = F.scaled_dot_product_attention(packed, self.k, self.v, attn_mask=mask, scale=self.scale)
            return out.flatten(1, 2)[:, :, None]
        return F.scaled_dot_product_attention(q, *self._keys(chosen), attn_mask=mask, scale=self.scale)

    def _with_text_only_heads(self, kept: Tensor) -> Tensor:
        """Add the lost heads, which attend to text only, and restore the order of heads."""
        split = self.split
        q, chosen = self._queries(split.lost)
        mask = self.stage.bias("text only", lambda: self.stage.text_only_mask, q.dtype)
        lost = F.scaled_dot_product_attention(q, *self._keys(chosen), attn_mask=mask, scale=self.scale)
        both, order = torch.cat([kept, lost], 1), [*split.kept, *split.lost]
        if order == sorted(order):
            return both
        return both.index_select(1, torch.tensor(order, device=q.device).argsort())

    def _keys(self, chosen: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
        """Return keys and values repeated for every (chosen) query head."""
        group = self.split.group
        if chosen is None:
            return tuple(x if group == 1 else x.repeat_interleave(group, 1) for x in (self.k, self.v))
        wanted = tuple(h // group for h in chosen)
        return _heads(self.k, wanted), _heads(self.v, wanted)

    def _dense(self) -> tuple[Tensor, Tensor]:
        """Attend with text and visual rows in sequence order, so that a causal mask needs no tensor."""
        stage, (q, chosen) = self.stage, self._queries(self.split.kept)
        rows = stage.join(q, self.rows[0], None, q.shape[1])
        mask = None if stage.plain else stage.bias("dense", lambda: stage.dense_mask, q.dtype)
        out = F.scaled_dot_product_attention(
            rows, *self._keys(chosen), attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return pick(out, stage.text_at, 2), pick(out, stage.vis_at, 2)

    def _near(self) -> Tensor:
        """Attend from visual rows to the window on their patch grid and to the text before them."""
        stage, pruning = self.stage, self.pruning
        (q, *mine), (k, v) = self.rows, self._keys(self.split.kept)
        if stage.vis.shape[1] and int((stage.vis >= 0).sum()) != int(stage.layout.visual.sum()):
            make = lambda: near_mask(stage, pruning.radius, pruning.causal)
            mask = stage.bias(("near", pruning.radius, pruning.causal), make, q.dtype)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        columns, _ = stage.words
        mine = [self._repeat_visual(x) for x in mine]
        words = [pick(x, columns, 2) for x in (k, v)]
        return attend_near(
            q, *mine, *words, stage, radius=pruning.radius, causal=pruning.causal, scale=self.scale
        )

    def _repeat_visual(self, x: Tensor) -> Tensor:
        """Repeat keys or values of visual rows for every kept query head."""
        split = self.split
        if split.kept is None:
            return x if split.group == 1 else x.repeat_interleave(split.group, 1)
        needed = split.needed or range(x.shape[1])
        place = {head: at for at, head in enumerate(needed)}
        return _heads(x, tuple(place[h // split.group] for h in split.kept))

    def last_row(self) -> Tensor:
        """Compute the attention of the last text row to visual rows (B, n_v), mean over all heads."""
        k, _ = self._keys(None)
        weights = softmax_rows(self.q[:, :, -1:], k, self.stage.mask(self.stage.text[:, -1:]), self.scale)
        past = k.shape[2] - self.stage.cols.shape[1]
        return pick(weights.mean(1)[:, 0, past:], self.stage.vis_at)


def _heads(x: Tensor, chosen: tuple[int, ...]) -> Tensor:
    """Select heads of (B, H, n, D); contiguous heads without a copy."""
    picked = feature_index(chosen)
    return x[:, picked] if type(picked) is slice else x.index_select(1, picked.to(x.device))


def softmax_rows(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention weights (B, H, n, C) of a few rows, in float32 or better."""
    scores = (q @ k.transpose(-1, -2) * scale).to(torch.promote_types(q.dtype, torch.float32))
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)
