"""The cache `kivi`: all tokens quantised but the newest (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import cache
from mmrl.kv_cache import quantization
from mmrl.kv_cache.blocks import CodedBlock, collect
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.row_groups import group_slots
from mmrl.kv_cache.sliding_window import RaggedRows, ResidualWindow


@dataclass(frozen=True, kw_only=True)
class KiviRecipe(Recipe):
    """Older tokens quantised, the newest exact."""

    nbits: int
    value_nbits: int
    q_group_size: int
    residual_length: int
    rule: quantization.Rule
    rotate: bool

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Quantise older tokens of prompts (P, h, S, D) once for all rows; the rest goes to their windows."""
        slots = self._slots(layout, keys.device)
        window = ResidualWindow(
            self.nbits, self.value_nbits, self.q_group_size, self.residual_length, self.rule, self.rotate
        )
        shared: tuple[list[Part], list[Part]] = [], []
        old, flat = slots["keys"], slots["keys"].flatten(1)
        if flat.shape[1]:
            groups = collect(keys, flat).unflatten(2, old.shape[1:])
            codes = window.code_keys(groups, (old >= 0)[:, None, :, :, None])
            shared[0].append(Part(CodedBlock(codes, self.rotate), flat, name="keys"))
        old = slots["values"]
        if old.shape[1]:
            codes = window.code_values(collect(values, old), (old >= 0)[:, None, :, None])
            tensors = (x[:, :, None] for x in (codes.packed, codes.scale, codes.low))
            codes = quantization.Codes(*tensors, codes.nbits, codes.size)
            shared[1].append(Part(CodedBlock(codes, self.rotate), old, name="values"))
        rows = layout.groups.owner.to(keys.device)
        new = []
        for name, x in (("keys", keys), ("values", values)):
            at = slots[f"new {name}"]
            new.append(RaggedRows({"x": collect(x, at)[rows]}, at[rows], (at >= 0).sum(1)[rows]))
        window.start(*new, layout.length)
        return *shared, window

    def _slots(self, layout: PromptLayout, device: torch.device) -> dict[str, Tensor]:
        """Find the slots of older keys (P, E, g), older values (P, n), and of the newest of either."""
        if not layout.made:
            real = layout.real.cpu()
            rank = real.cumsum(1) - 1
            length = real.sum(1, keepdim=True)
            single = torch.zeros_like(rank)
            # As if tokens had come one by one: keys leave in blocks of residual_length, values one by one.
            keys = real & (rank < length - length % self.residual_length)
            values = real & (rank < length - self.residual_length)
            layout.made = {
                "keys": group_slots(keys, rank.clamp(min=0) // self.q_group_size).to(device),
                "values": group_slots(values, single).flatten(1).to(device),
                "new keys": group_slots(real & ~keys, single).flatten(1).to(device),
                "new values": group_slots(real & ~values, single).flatten(1).to(device),
            }
        return layout.made


@cache
def kivi(
    config: Any,
    visual: Tensor | None,
    mask: Tensor | None,
    *,
    nbits: Literal[1, 2, 4, 8] = 2,
    value_nbits: Literal[1, 2, 4, 8] | None = None,
    q_group_size: PositiveInt = 32,
    residual_length: PositiveInt = 128,
    rule: Literal["range", "fitted"] = "range",
    rotate: bool = False,
    fused: bool = True,
) -> Any:
    """Quantise all tokens but the newest of every row (KIVI, arXiv 2402.02750).

    Keys have one scale per channel and group of tokens, values one per token and group of channels. Keys are
    quantised together whenever `residual_length` of them are exact, values when they are `residual_length`
    steps old. The paper advises 2 bits where every query head has its own keys, and 4 where they are shared.

    Args:
        config: Config of the model.
        visual: Not used.
        mask: Which tokens are not padding, (P, S) bool.
        nbits: Bits per number of keys.
        value_nbits: Bits per number of values; `nbits` by default (other bits are ours).
        q_group_size: Tokens of a group of keys, channels of a group of values.
        residual_length: Newest tokens that stay exact, a multiple of `q_group_size`.
        rule: Range of a group: minimum to maximum as published, or fitted for least squared error (ours).
        rotate: Rotate channels first, which spreads outliers (ours).
        fused: Attention reads codes; without, it reads dense tensors made anew in every step.
    """
    value_nbits = nbits if value_nbits is None else value_nbits
    if q_group_size < 1 or residual_length < 1 or residual_length % q_group_size:
        raise ValueError(
            f"`residual_length` ({residual_length}) must be a multiple of `q_group_size` ({q_group_size}), "
            "because keys leave the window in whole groups"
        )
    text = config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size % q_group_size or q_group_size * value_nbits % 8:
        raise ValueError(
            f"`q_group_size` ({q_group_size}) must divide the head size ({size}) and fill whole bytes"
        )
    recipe = KiviRecipe(
        nbits=nbits, value_nbits=value_nbits, q_group_size=q_group_size, residual_length=residual_length,
        rule=rule, rotate=rotate,
    )  # fmt: skip
    return make_cache(config, PromptLayout(None, mask), recipe, fused=fused)
