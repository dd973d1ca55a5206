"""The cache `kivi`: all tokens except the newest are quantised (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import cache
from mmrl.kv_cache.blocks import collect
from mmrl.kv_cache.hf_cache import head_size, make_cache
from mmrl.kv_cache.layers import Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.row_groups import group_slots
from mmrl.kv_cache.tails import KiviCodec, RaggedRows, ResidualWindow


@dataclass(frozen=True)
class KiviRecipe(Recipe):
    """Recipe that quantises older tokens and stores the newest tokens exactly."""

    codec: KiviCodec

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Return positions (-1: padding) of old keys in groups (P, E, g), and of other tokens (P, n)."""
        rank, length = real.cumsum(1) - 1, real.sum(1, keepdim=True)  # without padding
        residual = self.codec.residual_length
        # Quantise what decoding token by token would have: blocks of residual_length keys, single values.
        keys = real & (rank < length - length % residual)
        values = real & (rank < length - residual)
        return {
            "keys": group_slots(keys, rank.clamp(min=0) // self.codec.q_group_size),
            "values": group_slots(values).flatten(1),
            "new keys": group_slots(real & ~keys).flatten(1),
            "new values": group_slots(real & ~values).flatten(1),
        }

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Quantise old tokens of P prompts (P, h, S, D), shared by their answers; copy new tokens to each."""
        shared: tuple[list[Part], list[Part]] = [], []
        old, flat = layout.slots["keys"], layout.slots["keys"].flatten(1)
        if flat.shape[1]:
            groups = collect(keys, flat).unflatten(2, old.shape[1:])  # (P, h, E, g, D)
            codes = self.codec.code_keys(groups, (old >= 0)[:, None, :, :, None])
            shared[0].append(Part(self.codec.key_block(codes), flat, name="keys"))
        old = layout.slots["values"]
        if old.shape[1]:
            codes = self.codec.code_values(collect(values, old), (old >= 0)[:, None, :, None])
            shared[1].append(Part(self.codec.value_block(codes), old, name="values"))
        # The newest tokens will differ between answers, so the row of each answer gets its own copy of them.
        rows, new = layout.groups.owner.to(keys.device), []
        for name, x in (("new keys", keys), ("new values", values)):
            at = layout.slots[name]  # (P, n), -1 if a prompt has fewer new tokens
            new.append(RaggedRows({"x": collect(x, at)[rows]}, at[rows], (at >= 0).sum(1)[rows]))
        return *shared, ResidualWindow(self.codec, *new, layout.length)


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
    """Quantise all tokens of a row except the newest (KIVI, arXiv 2402.02750).

    Keys have one scale per channel and group of tokens; values have one scale per token and group of
    channels. Whenever `residual_length` keys are exact, they are quantised together; each value is quantised
    when it is `residual_length` steps old. The paper advises 2 bits if every query head has its own keys, and
    4 bits if query heads share keys.

    Args:
        config: Configuration of the model.
        visual: Not used.
        mask: Mask of the tokens that are not padding, (P, S) bool for P prompts of S tokens.
        nbits: Bits per element of the keys.
        value_nbits: Bits per element of the values; by default `nbits` (other numbers are our extension).
        q_group_size: Number of tokens in a group of keys, and of channels in a group of values.
        residual_length: Number of newest tokens that are not quantised, a multiple of `q_group_size`.
        rule: Range of a group. `range`: minimum to maximum, as published. `fitted`: least error (ours).
        rotate: Whether to rotate the channels first, which spreads outliers (ours).
        fused: Whether attention reads the codes directly; otherwise every step decodes them to dense tensors.
    """
    value_nbits = value_nbits or nbits
    if residual_length % q_group_size:
        raise ValueError(
            f"`residual_length` ({residual_length}) must be a multiple of `q_group_size` ({q_group_size}), "
            "because keys leave the window in whole groups"
        )
    size = head_size(config.get_text_config(decoder=True))
    # Each channel group of the values is multiplied separately, so its packed codes must begin at a byte.
    if size % q_group_size or q_group_size * value_nbits % 8:
        raise ValueError(
            f"`q_group_size` ({q_group_size}) must divide the head size ({size}) and fill whole bytes"
        )
    codec = KiviCodec(
        nbits=nbits, value_nbits=value_nbits, q_group_size=q_group_size, residual_length=residual_length,
        rule=rule, rotated=rotate,
    )  # fmt: skip
    return make_cache(config, None, mask, KiviRecipe(codec), fused=fused)
