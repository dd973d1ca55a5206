"""Attention of one pruned layer: text tokens use all heads, visual tokens only some of the heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.compression.pruning.local_attention import attend_near, window_mask
from mmrl.compression.pruning.patch_grid import pick
from mmrl.compression.pruning.sliced_linear import feature_index, take
from mmrl.compression.pruning.spec import PruningSpec
from mmrl.compression.pruning.token_stages import TokenStage

Heads = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HeadSplit:
    """Query heads kept and dropped for visual tokens, and the key heads that the kept heads read (GQA)."""

    kept: Heads | None
    lost: Heads
    needed: Heads | None
    group: int


@lru_cache(maxsize=1024)
def split_heads(kept: Heads | None, heads: int, kv_heads: int) -> HeadSplit:
    """Split the query heads of a layer into heads kept and dropped for visual tokens; None keeps all."""
    group = heads // kv_heads
    if kept is None or len(kept) == heads:
        return HeadSplit(None, (), None, group)
    lost = tuple(h for h in range(heads) if h not in kept)
    needed = tuple(sorted({h // group for h in kept}))
    return HeadSplit(kept, lost, None if len(needed) == kv_heads else needed, group)


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention of one layer: queries, keys and values, and the computation on them.

    `q` holds the queries of text tokens (B, H, n_t, D). `k` and `v` hold the keys and values (B, Hkv, C, D)
    of all C tokens that can be attended to. `rows` holds the queries, keys and values of visual tokens, only
    for the heads kept for them; the queries are None if the layer is frozen.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: tuple[Tensor | None, Tensor, Tensor] | None
    stage: TokenStage
    split: HeadSplit
    pruning: PruningSpec
    scale: float
    module: nn.Module

    def attend(self) -> tuple[Tensor, Tensor | None]:
        """Compute attention of text tokens over all heads, and of visual tokens over the kept heads."""
        stage, kept, lost, vis = self.stage, self.split.kept, self.split.lost, None
        if not torch.is_tensor(self.k):
            return self._attend_quantised_cache(), None
        # `rows` has no queries if there are no visual tokens, if the layer is frozen, or if no head is kept.
        if self.rows is None or self.rows[0] is None:
            if not lost or not stage.any_visual:
                return self._attend_text(None), None
            text = self._attend_text(kept)
        elif self.pruning.radius is None:
            text, vis = self._attend_together()
        else:
            text, vis = self._attend_text(kept), self._attend_near()
        if lost:  # in dropped heads, text attends only to text
            q, make = _pick_heads(self.q, lost), lambda: stage.mask(stage.text, text_only=True)
            mask = stage.bias("text only", make, q.dtype)
            rest = F.scaled_dot_product_attention(q, *self.keys(lost), attn_mask=mask, scale=self.scale)
            text, order = torch.cat([text, rest], 1), [*kept, *lost]
            if order != sorted(order):
                text = text.index_select(1, torch.tensor(order, device=text.device).argsort())
        return text, vis

    def keys(self, heads: Heads | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the query heads read, one per query head; None: all heads."""
        group = self.split.group
        if heads is None:
            return tuple(x if group == 1 else x.repeat_interleave(group, 1) for x in (self.k, self.v))
        wanted = tuple(h // group for h in heads)  # a `group` of query heads shares a key head
        return _pick_heads(self.k, wanted), _pick_heads(self.v, wanted)

    def last_row(self) -> Tensor:
        """Compute the attention (B, n_v) of the last text token to visual tokens, averaged over heads."""
        k, _ = self.keys(None)
        weights = softmax_rows(self.q[:, :, -1:], k, self.stage.mask(self.stage.text[:, -1:]), self.scale)
        past = k.shape[2] - self.stage.cols.shape[1]  # number of columns from earlier calls
        return pick(weights.mean(1)[:, 0, past:], self.stage.vis_at)

    def _attend_quantised_cache(self) -> Tensor:
        """Attend to a quantised cache with its registered attention function; returns (B, H, n_t, D)."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.rows is not None:
            raise ValueError(
                "images after the first call need keys and values as tensors; set `fused: false` of the "
                "cache. A cache that selects tokens during the prefill (`vl_cache`) "
                "does not fit a model whose visual tokens are pruned"
            )
        stage, lost, mask = self.stage, self.split.lost, self.stage.text_mask

        def mask_by_head() -> Tensor:  # (B, H, n_t, C): dropped heads attend only to text
            is_lost = torch.zeros(self.q.shape[1], dtype=torch.bool, device=self.q.device)
            is_lost[list(lost)] = True
            text_only = stage.mask(stage.text, text_only=True)
            return torch.where(is_lost[:, None, None], text_only, stage.mask(stage.text))

        if lost and stage.any_visual:
            mask = stage.once(("heads", lost), mask_by_head)
        read = ALL_ATTENTION_FUNCTIONS[self.module.config._attn_implementation]
        out, _ = read(self.module, self.q, self.k, self.v, mask, scaling=self.scale, dropout=0.0)
        return out.transpose(1, 2)

    def _attend_text(self, heads: Heads | None) -> Tensor:
        q, stage, group = _pick_heads(self.q, heads), self.stage, self.split.group
        if not q.shape[1]:
            return q
        mask = stage.text_mask
        if mask is not None:
            if stage.plain and stage.all_text:
                return F.scaled_dot_product_attention(q, *self.keys(heads), is_causal=True, scale=self.scale)
            mask = stage.bias("text", lambda: stage.text_mask, q.dtype)
        if heads is None and q.shape[2] == 1 and group > 1:
            # With one query per head, the query heads of a group become queries of their key head, so that
            # keys are not repeated: (B, H, 1, D) becomes (B, Hkv, group, D).
            packed = q.unflatten(1, (-1, group))[:, :, :, 0]
            out = F.scaled_dot_product_attention(packed, self.k, self.v, attn_mask=mask, scale=self.scale)
            return out.flatten(1, 2)[:, :, None]
        return F.scaled_dot_product_attention(q, *self.keys(heads), attn_mask=mask, scale=self.scale)

    def _attend_together(self) -> tuple[Tensor, Tensor]:
        """Attend with text and visual tokens in sequence order, so that causal attention needs no mask."""
        stage, q = self.stage, _pick_heads(self.q, self.split.kept)
        rows = stage.join(q, self.rows[0], None, q.shape[1])
        mask = None if stage.plain else stage.bias("all", lambda: stage.mask(stage.cols), q.dtype)
        keys = self.keys(self.split.kept)
        out = F.scaled_dot_product_attention(
            rows, *keys, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return pick(out, stage.text_at, 2), pick(out, stage.vis_at, 2)

    def _attend_near(self) -> Tensor:
        """Attend from visual tokens to their window on the patch grid and to the text before them."""
        stage, pruning, split = self.stage, self.pruning, self.split
        (q, *mine), (k, v) = self.rows, self.keys(split.kept)
        # Block-wise attention needs complete grids. If tokens were removed, use a mask over all columns.
        if stage.once("lost", lambda: int(stage.is_token.sum()) != int(stage.call.layout.visual.sum())):
            make = lambda: window_mask(stage, pruning)
            mask = stage.bias(("near", pruning.radius, pruning.causal), make, q.dtype)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        if split.kept is not None:  # `mine` has only the key heads that the kept query heads read
            place = {head: at for at, head in enumerate(split.needed or range(mine[0].shape[1]))}
            heads = tuple(place[h // split.group] for h in split.kept)
            mine = [_pick_heads(x, heads) for x in mine]
        elif split.group > 1:
            mine = [x.repeat_interleave(split.group, 1) for x in mine]
        text = tuple(pick(x, stage.words[0], 2) for x in (k, v))
        return attend_near((q, *mine), text, stage, pruning, self.scale)


def _pick_heads(x: Tensor, heads: Heads | None) -> Tensor:
    """Select heads of (B, H, n, D); contiguous heads are not copied."""
    return take(x, 1, feature_index(heads))


def softmax_rows(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention weights (B, H, n, C) of a few queries, in float32 or better."""
    scores = (q @ k.transpose(-1, -2) * scale).to(torch.promote_types(q.dtype, torch.float32))
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)
