"""Forward pass of a pruned model: text and visual tokens run separately through every layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, rotate
from mmrl.compression.model_adapters.lookup import adapter_of
from mmrl.compression.pruning.attention import HeadSplit, LayerAttention, softmax_rows, split_heads
from mmrl.compression.pruning.patch_grid import LAYOUT, NO_TOKEN, lay_out, pack_places, pick
from mmrl.compression.pruning.sliced_linear import FeatureIndex, feature_index, sliced_linear
from mmrl.compression.pruning.spec import ModelShape, PruningSpec, pruning_of, shape_of
from mmrl.compression.pruning.token_stages import ColumnIndex, ForwardCall, TokenStage, read_mask
from mmrl.compression.pruning.vision_tower import encode, encode_ahead


@dataclass(frozen=True, eq=False)
class SelectionContext:
    """Inputs of a token selection before layer `layer`.

    `text` (B, n_t, width) and `vis` (B, n_v, width) are hidden states. `seen` (B, n_v) is the attention of
    the last text token to every visual token in the previous layer, mean over heads, if the reduction asked
    for it (`probe`); `rank()` computes the same with the projections of this layer.
    """

    layer: int
    stage: TokenStage
    text: Tensor
    vis: Tensor
    seen: Tensor | None
    rank: Any

    @property
    def is_token(self) -> Tensor:
        """Mark visual rows that are tokens, not padding: (B, n_v)."""
        return self.stage.vis >= 0


@dataclass(frozen=True, eq=False)
class Selection:
    """Visual tokens that are kept, as a mask (B, n_v), and their new states if these change."""

    keep: Tensor
    vis: Tensor | None = None


def forward_core(core: nn.Module, *args: Any, **inputs: Any) -> Any:
    """Replace `forward` of the core model: pass the places of visual tokens to the language model."""
    if args:
        inputs["input_ids"] = args[0]
    pruning = pruning_of(core)
    adapter = adapter_of(core)
    if pruning.tower:
        encode_ahead(core, inputs)
    token = LAYOUT.set(lay_out(core, adapter, inputs, grids=pruning.radius is not None))
    try:
        return type(core).forward(core, **inputs)
    finally:
        LAYOUT.reset(token)


def forward_features(core: nn.Module, kind: str, *args: Any, **kwargs: Any) -> Any:
    """Replace `get_image_features` and `get_video_features`: record what pruning needs later."""
    method = getattr(type(core), f"get_{kind}_features")
    bound = inspect.signature(method).bind(core, *args, **kwargs)
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
    arguments |= bound.arguments.get("kwargs", {})
    return encode(core, adapter_of(core), kind, pruning_of(core).tower, arguments)


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
    """Replace `forward` of the language model; removed visual tokens keep their last hidden state."""
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutputWithPast

    _check_unsupported(other)
    layout = LAYOUT.get()
    if layout is None:
        raise ValueError("the language model of a pruned model is called through the whole model, not alone")
    if past_key_values is None and use_cache:
        past_key_values = DynamicCache(config=text.config)
    _check_cache(past_key_values, pruning_of(core))
    shape, batch, length = shape_of(core), *inputs_embeds.shape[:2]
    columns = ColumnIndex(past_key_values, shape.layers)
    past = columns.length()
    known, allowed = read_mask(attention_mask, past, length)
    call = ForwardCall(layout, columns, past, known, allowed)
    adapter = adapter_of(core)
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=inputs_embeds.device)[None]
    rotary = text.rotary_emb(inputs_embeds, adapter.positions(position_ids, batch))
    run = PrunedForward(text, adapter, shape, pruning_of(core), call, past_key_values, rotary)
    return BaseModelOutputWithPast(last_hidden_state=run(inputs_embeds), past_key_values=past_key_values)


def _check_unsupported(other: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if other.get(name):
            raise ValueError(f"a pruned model has no `{name}`: its layers have different tokens")
    if other.get("deepstack_visual_embeds") is not None:
        raise ValueError("features of earlier layers of the tower are not supported by pruned models")


def _check_cache(cache: Any, pruning: PruningSpec) -> None:
    """Raise if tokens are removed and the cache needs the same length in all layers."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    kinds -= {"DynamicLayer", "PromptCacheLayer"}
    if kinds and pruning.reductions:
        raise ValueError(
            f"late layers cache fewer tokens than early ones, which {', '.join(sorted(kinds))} of this cache "
            "does not support; use transformers' DynamicCache, `visual_quant` or `kivi` with "
            "`drop_visual_layers` and with token pruners"
        )


class PrunedForward:
    """One pass of hidden states through all layers of a pruned language model."""

    def __init__(
        self, text: nn.Module, adapter: ModelAdapter, shape: ModelShape, pruning: PruningSpec,
        call: ForwardCall, cache: Any, rotary: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        self.text, self.adapter, self.shape, self.pruning = text, adapter, shape, pruning
        self.call, self.cache, self.rotary = call, cache, rotary
        self.observer = OBSERVER.get()

    def __call__(self, states: Tensor) -> Tensor:
        """Apply all layers and the final norm to hidden states (B, S, width)."""
        call, blocks = self.call, self.text.layers[: self.shape.layers]
        visual = call.layout.visual
        if call.known is not None:
            visual = visual & call.known[:, call.past :]
        stage = call.stage(0, pack_places(visual))
        text, vis = pick(states, stage.text), pick(states, stage.vis)
        seen, number = None, 0
        rotary = self._rotary(stage)
        for i, block in enumerate(blocks):
            for reduction in (reduction for reduction in self.pruning.reductions if reduction.layer == i):
                number += 1
                stage, vis = self._reduce(reduction, number, stage, text, vis, seen)
                rotary = self._rotary(stage)
            probe = any(reduction.probe and reduction.layer == i + 1 for reduction in self.pruning.reductions)
            text, vis, seen = self._layer(block, i, text, vis, stage, rotary, probe)
        return self._merge(states, [(stage.text, text), (stage.vis, vis)])

    def _rotary(self, stage: TokenStage) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        batch = len(stage.text)
        cos, sin = (x.expand(batch, -1, -1) for x in self.rotary)
        return (
            (pick(cos, stage.text), pick(sin, stage.text)),
            (pick(cos, stage.vis), pick(sin, stage.vis)),
        )

    def _merge(self, states: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Apply the final norm and scatter rows back to their places in the sequence."""
        batch, size, width = states.shape
        out = states.new_zeros(batch, size + 1, width)
        lines = torch.arange(batch, device=states.device)[:, None]
        for at, rows in parts:
            out[lines, at.masked_fill(at < 0, size)] = self.text.norm(rows)
        return out[:, :size]

    def _reduce(
        self, reduction: Any, number: int, stage: TokenStage, text: Tensor, vis: Tensor, seen: Tensor | None
    ) -> tuple[TokenStage, Tensor]:
        """Apply a token reduction; returns the next stage and its visual rows."""
        is_token = stage.vis >= 0
        keep = torch.zeros_like(is_token)
        if reduction.choose is not None and stage.vis.shape[1]:
            scene = SelectionContext(
                reduction.layer, stage, text, vis, seen, lambda: self._rank(reduction.layer, text, vis, stage)
            )
            choice = reduction.choose(scene)
            keep, vis = choice.keep & is_token, vis if choice.vis is None else choice.vis
        stay = pack_places(keep)
        after = self.call.stage(number, pick(stage.vis, stay).masked_fill(stay < 0, NO_TOKEN))
        lay_out = getattr(self.cache, "lay_out", None)  # of `PromptCache`: which of the columns are visual
        if lay_out is not None and not self.call.past:
            lay_out(reduction.layer, after.visual, after.seen)
        return after, pick(vis, stay)

    def _layer(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: TokenStage, rotary: Any, probe: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer = lambda text, vis: self._through(block, i, text, vis, stage, rotary, probe)
        # As transformers' layers do. With a cache, recomputation would append keys and values twice.
        if getattr(block, "gradient_checkpointing", False) and block.training and self.cache is None:
            return block._gradient_checkpointing_func(layer, text, vis)
        return layer(text, vis)

    def _through(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: TokenStage, rotary: Any, probe: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        text_delta, visual_delta, seen = self._attend(block, i, text, vis, stage, rotary, probe)
        text = text + text_delta
        text = text + block.mlp(block.post_attention_layernorm(text))
        if vis.shape[1] and i not in self.pruning.frozen:
            vis = vis if visual_delta is None else vis + visual_delta
            inner = feature_index(self.pruning.ffn_units_of(i))
            note = (
                None
                if self.observer is None
                else lambda hidden: self.observer("ffn_units", i, (hidden, stage))
            )
            vis = vis + gated_mlp(block.mlp, block.post_attention_layernorm(vis), inner, note)
        return text, vis, seen

    def _attend(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: TokenStage, rotary: Any, probe: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute attention outputs of text and visual rows in layer `i`, and the probe's attention."""
        attn = block.self_attn
        split = split_heads(self.pruning.heads_of(i), self.shape.heads, self.shape.kv_heads)
        q, k, v = self.adapter.project(attn, block.input_layernorm(text), None, None)
        q, k = rotate(q, *rotary[0]), rotate(k, *rotary[0])
        frozen, rows = i in self.pruning.frozen, None
        if vis.shape[1]:
            rows = self._visual(attn, block.input_layernorm(vis), split, rotary[1], frozen)
            k, v = (
                stage.join(mine, theirs, feature_index(split.needed), self.shape.kv_heads)
                for mine, theirs in zip((k, v), rows[1:], strict=True)
            )
        elif not stage.all_text:
            k, v = pick(k, stage.gather, 2), pick(v, stage.gather, 2)
        if self.cache is not None:
            k, v = self.cache.update(k, v, i)
        view = LayerAttention(q, k, v, rows, stage, split, self.pruning, attn.scaling, attn)
        if self.observer is not None:
            self.observer("attention", i, view)
        text_delta, visual_delta = view.attend()
        text_delta = attn.o_proj(text_delta.transpose(1, 2).flatten(2))
        if visual_delta is not None:
            visual_delta = sliced_linear(
                attn.o_proj,
                visual_delta.transpose(1, 2).flatten(2),
                columns=split.columns(self.shape.head_dim),
            )
        return text_delta, visual_delta, view.last_row() if probe and stage.vis.shape[1] else None

    def _visual(
        self, attn: nn.Module, x: Tensor, split: HeadSplit, rotary: Any, frozen: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Project visual rows: queries of the kept heads, and the keys and values that they read."""
        size = self.shape.head_dim
        wanted = feature_index(() if frozen else split.kept, size)
        q, k, v = self.adapter.project(attn, x, wanted, feature_index(split.needed, size))
        return (rotate(q, *rotary) if q.shape[1] else None), rotate(k, *rotary), v

    def _rank(self, i: int, text: Tensor, vis: Tensor, stage: TokenStage) -> Tensor:
        """Compute the last text token's attention to visual rows in layer `i`, mean over heads: (B, n_v)."""
        block = self.text.layers[i]
        attn, rotary = block.self_attn, self._rotary(stage)
        q, k, _ = self.adapter.project(attn, block.input_layernorm(text), None, None)
        _, vk, _ = self.adapter.project(attn, block.input_layernorm(vis), feature_index(()), None)
        keys = torch.cat([rotate(k, *rotary[0]), rotate(vk, *rotary[1])], 2)
        keys = keys.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)
        last = rotate(q, *rotary[0])[:, :, -1:]
        real = torch.cat([stage.text >= 0, stage.vis >= 0], 1)
        weights = softmax_rows(last, keys, real[:, None, None], attn.scaling)
        return weights.mean(1)[:, 0, text.shape[1] :]


# Callback while an importance plan is measured: called with ("attention", layer, LayerAttention), and with
# ("ffn_units", layer, (inner units of visual rows (B, n_v, m), stage)).
OBSERVER: ContextVar[Callable[[str, int, Any], None] | None] = ContextVar("observer", default=None)


def gated_mlp(
    mlp: nn.Module, x: Tensor, inner: FeatureIndex, note: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Compute a gated feed-forward layer (SwiGLU) with some of its inner units."""
    hidden = mlp.act_fn(sliced_linear(mlp.gate_proj, x, rows=inner)) * sliced_linear(
        mlp.up_proj, x, rows=inner
    )
    if note is not None:
        note(hidden)
    return sliced_linear(mlp.down_proj, hidden, columns=inner)
