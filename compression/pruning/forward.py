"""How a pruned model runs: text rows and visual rows apart, each with its share of every layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import Decoder, rotate
from mmrl.compression.model_adapters.lookup import decoder_of
from mmrl.compression.pruning.attention import Split, View, softmax_rows, split_heads
from mmrl.compression.pruning.patch_grid import LAYOUT, NOWHERE, lay_out, pack_places, pick
from mmrl.compression.pruning.sliced_linear import Features, features, narrow
from mmrl.compression.pruning.spec import Pruning, Shape, pruning_of, shape_of
from mmrl.compression.pruning.token_stages import Call, Ledger, Stage, read_mask
from mmrl.compression.pruning.vision_tower import encode, encode_ahead


@dataclass(frozen=True, eq=False)
class Scene:
    """What a choice of visual tokens may look at, in front of layer `layer`.

    `text` (B, n_t, width) and `vis` (B, n_v, width) are states; `seen` (B, n_v) is what the last text token
    of every prompt paid to every visual token in the layer before, mean over heads, where the cut asked for
    it; `rank(rows)` computes the same with this layer's projections.
    """

    layer: int
    stage: Stage
    text: Tensor
    vis: Tensor
    seen: Tensor | None
    rank: Any

    @property
    def there(self) -> Tensor:
        """Mark visual rows that are tokens, not padding: (B, n_v)."""
        return self.stage.vis >= 0


@dataclass(frozen=True, eq=False)
class Choice:
    """Visual rows that stay (B, n_v), and their states where they are changed."""

    keep: Tensor
    vis: Tensor | None = None


def run_core(core: nn.Module, *given: Any, **inputs: Any) -> Any:
    """Run a model without its head as its class does, with its visual tokens known to the language model."""
    if given:
        inputs["input_ids"] = given[0]
    pruning = pruning_of(core)
    decoder = decoder_of(core)
    if pruning.tower:
        encode_ahead(core, inputs)
    token = LAYOUT.set(lay_out(core, decoder, inputs, rasters=pruning.radius is not None))
    try:
        return type(core).forward(core, **inputs)
    finally:
        LAYOUT.reset(token)


def run_features(core: nn.Module, kind: str, *given: Any, **named: Any) -> Any:
    """Encode media as the class of the model does, and note what pruning asks of them later."""
    method = getattr(type(core), f"get_{kind}_features")
    bound = inspect.signature(method).bind(core, *given, **named)
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
    arguments |= bound.arguments.get("kwargs", {})
    return encode(core, decoder_of(core), kind, pruning_of(core).tower, arguments)


def run_text(
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
    """Run a language model with less visual computation. Visual states that leave early keep their last
    value."""
    from transformers import DynamicCache
    from transformers.modeling_outputs import BaseModelOutputWithPast

    _refuse(other)
    layout = LAYOUT.get()
    if layout is None:
        raise ValueError("the language model of a pruned model is called through the whole model, not alone")
    if past_key_values is None and use_cache:
        past_key_values = DynamicCache(config=text.config)
    _check_cache(past_key_values, pruning_of(core))
    shape, batch, given = shape_of(core), *inputs_embeds.shape[:2]
    ledger = Ledger(past_key_values, shape.layers)
    past = ledger.length()
    known, allowed = read_mask(attention_mask, past, given)
    call = Call(layout, ledger, past, known, allowed)
    decoder = decoder_of(core)
    if position_ids is None:
        position_ids = torch.arange(past, past + given, device=inputs_embeds.device)[None]
    turns = text.rotary_emb(inputs_embeds, decoder.positions(position_ids, batch))
    run = Run(text, decoder, shape, pruning_of(core), call, past_key_values, turns)
    return BaseModelOutputWithPast(last_hidden_state=run(inputs_embeds), past_key_values=past_key_values)


def _refuse(other: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if other.get(name):
            raise ValueError(f"a pruned model has no `{name}`: its layers do not hold the same tokens")
    if other.get("deepstack_visual_embeds") is not None:
        raise ValueError("features of earlier layers of the tower are not supported by pruned models")


def _check_cache(cache: Any, pruning: Pruning) -> None:
    """Where tokens leave, layers of a cache have different lengths."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    kinds -= {"DynamicLayer", "PromptCacheLayer"}
    if kinds and pruning.cuts:
        raise ValueError(
            f"late layers hold fewer tokens than early ones, which {', '.join(sorted(kinds))} of this cache "
            "cannot; use transformers' DynamicCache, `visual_quant` or `kivi` with `drop_visual_layers` "
            "and with pruners of tokens"
        )


class Run:
    """One pass of a language model through its layers."""

    def __init__(
        self, text: nn.Module, decoder: Decoder, shape: Shape, pruning: Pruning, call: Call, cache: Any,
        turns: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        self.text, self.decoder, self.shape, self.pruning = text, decoder, shape, pruning
        self.call, self.cache, self.turns = call, cache, turns
        self.watch = WATCH.get()

    def __call__(self, states: Tensor) -> Tensor:
        """Send states (B, S, width) through all layers."""
        call, blocks = self.call, self.text.layers[: self.shape.layers]
        stage = call.stage(0, pack_places(call.layout.visual if call.known is None else self._real()))
        text, vis = pick(states, stage.text), pick(states, stage.vis)
        seen, number = None, 0
        turns = self._turns(stage)
        for i, block in enumerate(blocks):
            for cut in (cut for cut in self.pruning.cuts if cut.layer == i):
                number += 1
                stage, vis = self._cut(cut, number, stage, text, vis, seen)
                turns = self._turns(stage)
            probe = any(cut.probe and cut.layer == i + 1 for cut in self.pruning.cuts)
            text, vis, seen = self._layer(block, i, text, vis, stage, turns, probe)
        return self._merge(states, [(stage.text, text), (stage.vis, vis)])

    def _real(self) -> Tensor:
        return self.call.layout.visual & self.call.known[:, self.call.past :]

    def _turns(self, stage: Stage) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        batch = len(stage.text)
        cos, sin = (x.expand(batch, -1, -1) for x in self.turns)
        return (
            (pick(cos, stage.text), pick(sin, stage.text)),
            (pick(cos, stage.vis), pick(sin, stage.vis)),
        )

    def _merge(self, states: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Normalise rows and put them back to where they came from."""
        batch, size, width = states.shape
        out = states.new_zeros(batch, size + 1, width)
        lines = torch.arange(batch, device=states.device)[:, None]
        for at, rows in parts:
            out[lines, at.masked_fill(at < 0, size)] = self.text.norm(rows)
        return out[:, :size]

    def _cut(
        self, cut: Any, number: int, stage: Stage, text: Tensor, vis: Tensor, seen: Tensor | None
    ) -> tuple[Stage, Tensor]:
        """Let visual rows leave: the next stage, and its visual rows."""
        there = stage.vis >= 0
        keep = torch.zeros_like(there)
        if cut.choose is not None and stage.vis.shape[1]:
            scene = Scene(cut.layer, stage, text, vis, seen, lambda: self._rank(cut.layer, text, vis, stage))
            choice = cut.choose(scene)
            keep, vis = choice.keep & there, vis if choice.vis is None else choice.vis
        stay = pack_places(keep)
        after = self.call.stage(number, pick(stage.vis, stay).masked_fill(stay < 0, NOWHERE))
        lay_out = getattr(self.cache, "lay_out", None)  # of a cache that must know what arrives where
        if lay_out is not None and not self.call.past:
            lay_out(cut.layer, after.visual, after.seen)
        return after, pick(vis, stay)

    def _layer(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: Stage, turns: Any, probe: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        layer = lambda text, vis: self._through(block, i, text, vis, stage, turns, probe)
        # As the layers of transformers do it; a cache would be written twice.
        if getattr(block, "gradient_checkpointing", False) and block.training and self.cache is None:
            return block._gradient_checkpointing_func(layer, text, vis)
        return layer(text, vis)

    def _through(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: Stage, turns: Any, probe: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        looked, watched, seen = self._attend(block, i, text, vis, stage, turns, probe)
        text = text + looked
        text = text + block.mlp(block.post_attention_layernorm(text))
        if vis.shape[1] and i not in self.pruning.frozen:
            vis = vis if watched is None else vis + watched
            inner = features(self.pruning.ffn_units_of(i))
            note = None if self.watch is None else lambda hidden: self.watch("ffn_units", i, (hidden, stage))
            vis = vis + inner_layer(block.mlp, block.post_attention_layernorm(vis), inner, note)
        return text, vis, seen

    def _attend(
        self, block: nn.Module, i: int, text: Tensor, vis: Tensor, stage: Stage, turns: Any, probe: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend in layer `i`: what is added to text rows and to visual rows, and what a probe saw."""
        attn, split = (
            block.self_attn,
            split_heads(self.pruning.heads_of(i), self.shape.heads, self.shape.kv_heads),
        )
        q, k, v = self.decoder.project(attn, block.input_layernorm(text), None, None)
        q, k = rotate(q, *turns[0]), rotate(k, *turns[0])
        frozen, rows = i in self.pruning.frozen, None
        if vis.shape[1]:
            rows = self._visual(attn, block.input_layernorm(vis), split, turns[1], frozen)
            k, v = (
                stage.join(mine, theirs, features(split.needed), self.shape.kv_heads)
                for mine, theirs in zip((k, v), rows[1:], strict=True)
            )
        elif not stage.all_text:
            k, v = pick(k, stage.gather, 2), pick(v, stage.gather, 2)
        if self.cache is not None:
            k, v = self.cache.update(k, v, i)
        view = View(q, k, v, rows, stage, split, self.pruning, attn.scaling, attn)
        if self.watch is not None:
            self.watch("attention", i, view)
        looked, watched = view.attend()
        looked = attn.o_proj(looked.transpose(1, 2).flatten(2))
        if watched is not None:
            watched = narrow(
                attn.o_proj, watched.transpose(1, 2).flatten(2), columns=split.columns(self.shape.head_dim)
            )
        return looked, watched, view.last_row() if probe and stage.vis.shape[1] else None

    def _visual(
        self, attn: nn.Module, x: Tensor, split: Split, turns: Any, frozen: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Project visual rows: queries of the kept heads, keys and values of the heads that those read."""
        size = self.shape.head_dim
        wanted = features(() if frozen else split.kept, size)
        q, k, v = self.decoder.project(attn, x, wanted, features(split.needed, size))
        return (rotate(q, *turns) if q.shape[1] else None), rotate(k, *turns), v

    def _rank(self, i: int, text: Tensor, vis: Tensor, stage: Stage) -> Tensor:
        """Compute what the last text token pays to every visual row with the projections of layer `i`, mean
        over heads: (B, n_v)."""
        block = self.text.layers[i]
        attn, turns = block.self_attn, self._turns(stage)
        q, k, _ = self.decoder.project(attn, block.input_layernorm(text), None, None)
        _, vk, _ = self.decoder.project(attn, block.input_layernorm(vis), features(()), None)
        keys = torch.cat([rotate(k, *turns[0]), rotate(vk, *turns[1])], 2)
        keys = keys.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)
        last = rotate(q, *turns[0])[:, :, -1:]
        real = torch.cat([stage.text >= 0, stage.vis >= 0], 1)
        weights = softmax_rows(last, keys, real[:, None, None], attn.scaling)
        return weights.mean(1)[:, 0, text.shape[1] :]


# Called with "attention", the number of a layer and its `View`, and with "ffn_units", the number and the
# inner units of visual rows (B, n_v, m) with their stage, while `plan` looks on.
WATCH: ContextVar[Callable[[str, int, Any], None] | None] = ContextVar("watch", default=None)


def inner_layer(
    mlp: nn.Module, x: Tensor, inner: Features, note: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Compute a gated layer with some of its inner units."""
    hidden = mlp.act_fn(narrow(mlp.gate_proj, x, rows=inner)) * narrow(mlp.up_proj, x, rows=inner)
    if note is not None:
        note(hidden)
    return narrow(mlp.down_proj, hidden, columns=inner)
