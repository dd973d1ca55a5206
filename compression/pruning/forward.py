"""Forward pass of a pruned model: text and visual tokens run separately through every layer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, rotate
from mmrl.compression.model_adapters.families import adapter_of
from mmrl.compression.pruning.attention import LayerAttention, softmax_rows, split_heads
from mmrl.compression.pruning.patch_grid import LAYOUT, NO_TOKEN, encode_ahead, lay_out, pack_places, pick
from mmrl.compression.pruning.sliced_linear import feature_index, sliced_linear
from mmrl.compression.pruning.spec import ModelShape, PruningSpec, TokenReduction, pruning_of, shape_of
from mmrl.compression.pruning.token_stages import ForwardCall, TokenStage, past_tokens, read_mask
from mmrl.kv_cache.hf_cache import PromptCache
from mmrl.runtime.modules import with_values

# Callback during the measurement of an importance plan. It gets ("attention", layer, LayerAttention), and
# ("ffn_units", layer, (inner units of visual tokens (B, n_v, m), stage)).
OBSERVER: ContextVar[Callable[[str, int, Any], None] | None] = ContextVar("observer", default=None)


def forward_core(core: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Run a pruned core model: find the visual tokens and pass their layout to the language model."""
    if args:
        inputs["input_ids"] = args[0]
    pruning = pruning_of(core)
    if pruning.tower:
        encode_ahead(core, inputs)
    token = LAYOUT.set(lay_out(core, inputs, grids=pruning.radius is not None))
    try:
        return type(core).forward(core, **inputs)
    finally:
        LAYOUT.reset(token)


def forward_text(
    text: nn.Module,
    core: nn.Module,
    *,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = None,
    **other: Any,
) -> Any:
    """Run a pruned language model. Its last hidden states are zeros for removed visual tokens."""
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutputWithPast

    for name in ("output_attentions", "output_hidden_states"):
        if other.get(name):
            raise ValueError(f"a pruned model has no `{name}`: its layers have different tokens")
    if other.get("deepstack_visual_embeds") is not None:
        raise ValueError("features of earlier layers of the tower are not supported by pruned models")
    layout, pruning, shape, adapter = LAYOUT.get(), pruning_of(core), shape_of(core), adapter_of(core)
    if layout is None:
        raise ValueError("the language model of a pruned model is called through the whole model, not alone")
    if past_key_values is None and use_cache:
        past_key_values = DynamicCache(config=text.config)
    cached = () if past_key_values is None else past_key_values.layers
    kinds = {type(layer).__name__ for layer in cached} - {"DynamicLayer", "PromptCacheLayer"}
    if kinds and pruning.reductions:
        raise ValueError(
            f"late layers cache fewer tokens than early ones, which {', '.join(sorted(kinds))} of this cache "
            "does not support; use transformers' DynamicCache, `visual_quant` or `kivi` with "
            "`drop_visual_layers` and with token pruners"
        )
    batch, length = inputs_embeds.shape[:2]
    past = past_tokens(past_key_values, shape.layers)
    is_token, allowed = read_mask(attention_mask, past, length)
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=inputs_embeds.device)[None]
    cos, sin = text.rotary_emb(inputs_embeds, adapter.positions(position_ids, batch))
    rotary = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    call = ForwardCall(layout, past_key_values, shape.layers, past, is_token, allowed, rotary)
    states = PrunedForward(text, adapter, shape, pruning, call)(inputs_embeds)
    return BaseModelOutputWithPast(last_hidden_state=states, past_key_values=past_key_values)


@dataclass(frozen=True, eq=False)
class PrunedForward:
    """A pass of hidden states through all layers of a pruned language model."""

    text: nn.Module
    adapter: ModelAdapter
    shape: ModelShape
    pruning: PruningSpec
    call: ForwardCall

    def __call__(self, states: Tensor) -> Tensor:
        """Apply all layers and the final norm to hidden states (B, S, width)."""
        stage, scores = self.call.stage(0), None
        text, vis = pick(states, stage.text), pick(states, stage.vis)
        for i, block in enumerate(self.text.layers[: self.shape.layers]):
            for number, reduction in enumerate(self.pruning.reductions, 1):
                if reduction.layer == i:
                    stage, vis, scores = self._reduce(number, reduction, stage, text, vis, scores)
            layer = partial(self._layer, i, block, stage)
            # Checkpoint as transformers does. With a cache, recomputation would append keys and values twice.
            if block.gradient_checkpointing and block.training and self.call.cache is None:
                text, vis, scores = block._gradient_checkpointing_func(layer, text, vis)
            else:
                text, vis, scores = layer(text, vis)
        # Scatter states to their positions in the sequence. Padding (-1) goes to an extra last position.
        batch, size, width = states.shape
        out = states.new_zeros(batch, size + 1, width)
        lines = torch.arange(batch, device=states.device)[:, None]
        for at, rows in ((stage.text, text), (stage.vis, vis)):
            out[lines, at.masked_fill(at < 0, size)] = self.text.norm(rows)
        return out[:, :size]

    def _reduce(
        self, number: int, reduction: TokenReduction, stage: TokenStage, text: Tensor, vis: Tensor,
        scores: Tensor | None,
    ) -> tuple[TokenStage, Tensor, Tensor | None]:  # fmt: skip
        """Apply a token reduction; return the next stage, its visual tokens and their scores."""
        keep = torch.zeros_like(stage.is_token)
        if reduction.choose is not None and vis.shape[1]:
            if reduction.scores and self.call.allowed is not None:
                raise ValueError(
                    "ranking visual tokens by the last token of the prompt needs a call that ends with it, "
                    "but answers are packed after the prompt under one mask. Set `gradient_checkpointing: "
                    "false`"
                )
            if reduction.scores == "layer":
                scores = self._scores(reduction.layer, stage, text, vis)
            # The number of remaining tokens depends on tensor values. A memory estimate uses fake tensors
            # without values, so `with_values` replaces them by zeros.
            chosen, vis = reduction.choose(
                stage, with_values(vis), None if scores is None else with_values(scores)
            )
            keep = chosen & stage.is_token
        # `stay` holds indices of the visual tokens that remain, padded with -1, for the next stage.
        stay = pack_places(keep)
        after = self.call.stage(number, pick(stage.vis, stay).masked_fill(stay < 0, NO_TOKEN))
        match self.call.cache:
            case PromptCache() as cache if not self.call.past:  # later layers store fewer columns
                cache.lay_out(reduction.layer, after.visual, after.seen)
        return after, pick(vis, stay), scores if scores is None else pick(scores, stay)

    def _scores(self, i: int, stage: TokenStage, text: Tensor, vis: Tensor) -> Tensor:
        """Return the last text token's attention to visual tokens in layer `i`, mean over heads: (B, n_v)."""
        block = self.text.layers[i]
        q, k, _ = self.adapter.project(block.self_attn, block.input_layernorm(text))
        _, vis_k, _ = self.adapter.project(
            block.self_attn, block.input_layernorm(vis), queries=feature_index(())
        )
        keys = torch.cat([rotate(k, *stage.text_rotary), rotate(vis_k, *stage.vis_rotary)], 2)
        keys = keys.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)  # one per query head
        last = rotate(q, *stage.text_rotary)[:, :, -1:]  # the last token, because padding is on the left
        is_token = torch.cat([stage.text >= 0, stage.is_token], 1)
        weights = softmax_rows(last, keys, is_token[:, None, None], block.self_attn.scaling)
        return weights.mean(1)[:, 0, text.shape[1] :]

    def _layer(
        self, i: int, block: nn.Module, stage: TokenStage, text: Tensor, vis: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Apply layer `i` to text and visual tokens; also return scores for the next reduction, if any."""
        attn, mlp, norm = block.self_attn, block.mlp, block.post_attention_layernorm
        attention, observe = self._attention(i, block, stage, text, vis), OBSERVER.get()
        if observe is not None:
            observe("attention", i, attention)
        # A pre-norm residual layer. Text tokens use all heads and inner units.
        text_out, vis_out = attention.attend()
        text = text + attn.o_proj(text_out.transpose(1, 2).flatten(2))
        text = text + mlp(norm(text))
        if vis.shape[1] and i not in self.pruning.frozen:
            if vis_out is not None:
                kept = feature_index(attention.split.kept, self.shape.head_dim)
                vis = vis + sliced_linear(attn.o_proj, vis_out.transpose(1, 2).flatten(2), columns=kept)
            # The gated MLP (SwiGLU), restricted to the inner units kept for visual tokens.
            x, units = norm(vis), feature_index(self.pruning.ffn_units_of(i))
            hidden = mlp.act_fn(sliced_linear(mlp.gate_proj, x, rows=units))
            hidden = hidden * sliced_linear(mlp.up_proj, x, rows=units)
            if observe is not None:
                observe("ffn_units", i, (hidden, stage))
            vis = vis + sliced_linear(mlp.down_proj, hidden, columns=units)
        # FastV ranks tokens by the attention of the layer before the reduction.
        wanted = any(r.scores == "previous" and r.layer == i + 1 for r in self.pruning.reductions)
        return text, vis, attention.last_row() if wanted and vis.shape[1] else None

    def _attention(
        self, i: int, block: nn.Module, stage: TokenStage, text: Tensor, vis: Tensor
    ) -> LayerAttention:
        """Project text and visual tokens to queries, keys and values; append keys and values to the cache."""
        attn, shape, cache = block.self_attn, self.shape, self.call.cache
        split = split_heads(self.pruning.heads_of(i), shape.heads, shape.kv_heads)
        q, k, v = self.adapter.project(attn, block.input_layernorm(text))
        q, k, rows = rotate(q, *stage.text_rotary), rotate(k, *stage.text_rotary), None
        if vis.shape[1]:
            # For visual tokens, compute only queries of kept heads, and the keys and values that these read.
            queries = feature_index(() if i in self.pruning.frozen else split.kept, shape.head_dim)
            keys, needed = feature_index(split.needed, shape.head_dim), feature_index(split.needed)
            vis_q, vis_k, vis_v = self.adapter.project(attn, block.input_layernorm(vis), queries, keys)
            vis_q = rotate(vis_q, *stage.vis_rotary) if vis_q.shape[1] else None
            rows = vis_q, rotate(vis_k, *stage.vis_rotary), vis_v
            k, v = (stage.join(*pair, needed, shape.kv_heads) for pair in zip((k, v), rows[1:], strict=True))
        elif not stage.all_text:
            k, v = pick(k, stage.gather, 2), pick(v, stage.gather, 2)
        if cache is not None:
            k, v = cache.update(k, v, i)
        return LayerAttention(q, k, v, rows, stage, split, self.pruning, attn.scaling, attn)
