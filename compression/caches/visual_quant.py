"""The cache `visual_quant`: quantised visual tokens, exact text (CalibQuant, arXiv 2502.14882)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt
from mmrl.config.registry import cache
from mmrl.kv_cache import quantization
from mmrl.kv_cache.blocks import CodedBlock, per_head
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import SplitRecipe
from mmrl.kv_cache.row_groups import group_slots


@dataclass(frozen=True, kw_only=True)
class VisualQuantRecipe(SplitRecipe):
    """Recipe that quantises the keys and values of visual tokens, and stores those of text exactly."""

    rule: quantization.Rule
    q_group_size: int
    per_image: bool
    axis_value: Literal["channel", "token"]
    rotated: bool
    score_drop: float
    guard: bool

    def slots(self, visual: Tensor, real: Tensor, size: int) -> dict[str, Tensor]:
        """Return positions (-1: padding) of text tokens (P, n), and of visual tokens in groups (P, E, n)."""
        group = None  # None: all visual tokens of a prompt are one group
        if self.per_image:
            # A group starts at each visual token after another kind of token; `pad` shifts right by one.
            group = ((visual & ~nn.functional.pad(visual, (1, -1))).cumsum(1) - 1).clamp(min=0)
        elif self.q_group_size:
            group = (visual.cumsum(1) - 1).clamp(min=0) // self.q_group_size
        return {"exact": group_slots(real & ~visual).flatten(1), "coded": group_slots(visual, group)}

    def encode(self, tokens: Tensor, slots: Tensor, side: quantization.Side) -> CodedBlock:
        """Quantise the tokens (P, h, E * n, D) at the slots (P, E, n): E groups of n tokens."""
        tokens = quantization.rotate(tokens) if self.rotated else tokens
        by_token = side == "values" and self.axis_value == "token"
        codes = quantization.quantize(
            tokens.unflatten(2, slots.shape[1:]),  # (P, h, E, n, D)
            int(self.nbits if side == "keys" else self.value_nbits),
            valid=(slots >= 0)[:, None, :, :, None],  # (P, 1, E, n, 1)
            rule=self.rule,
            side=side,
            channels=tokens.shape[-1] if by_token else 0,  # one scale for all channels of a token
        )
        return CodedBlock(codes, self.rotated)

    def calibrate(self, scores: Tensor, slots: Tensor) -> Tensor:
        """Compress scores (R, h, Q, n) of queries and visual tokens; the largest falls by `score_drop`."""
        if not self.score_drop:
            return scores
        valid = per_head(slots >= 0)[:, :, None]  # (R, 1, 1, n)
        return quantization.calibrate(scores, valid, drop=self.score_drop, guard=self.guard)


@cache
def visual_quant(
    config: Any,
    visual: Tensor,
    mask: Tensor,
    *,
    nbits: Literal[1, 2, 4, 8, 16] = 1,
    value_nbits: Literal[1, 2, 4, 8, 16] | None = None,
    rule: quantization.Rule = "fitted",
    q_group_size: NonNegativeInt = 0,
    per_image: bool = False,
    axis_value: Literal["channel", "token"] = "channel",
    rotate: bool = False,
    score_drop: NonNegativeFloat = 0.0,
    guard: bool = True,
    fused: bool = True,
) -> Any:
    """Quantise the visual tokens of prompts; text, answers and later images stay exact.

    CalibQuant (arXiv 2502.14882) is `rule: shrunk, score_drop: 3.0`; only `guard`, which preserves the order
    of scores, is our reading. The paper's first version is `rule: quantile`. Answers share a prompt's cache.

    Args:
        config: Configuration of the model.
        visual: Mask of the visual tokens, (P, S) bool for P prompts of S tokens.
        mask: Mask of the tokens that are not padding, (P, S) bool.
        nbits: Bits per element of the keys; 16: exact keys.
        value_nbits: Bits per element of the values; by default `nbits`; 16: exact values.
        rule: How the range of a group is chosen, see `mmrl.kv_cache.quantization.bounds`.
        q_group_size: Number of visual tokens that share a scale; 0: all visual tokens of a prompt.
        per_image: Whether the tokens of an image share a scale; cannot be combined with `q_group_size`.
        axis_value: Scales of the values. `channel`: one per channel and group. `token`: one per token.
        rotate: Whether to rotate the channels first, which spreads outliers.
        score_drop: Nats by which the largest visual score of a query is lowered (paper: 3); needs `fused`.
        guard: Whether scores that span less than `score_drop` become equal instead of changing their order.
        fused: Whether attention reads the codes directly; otherwise every step decodes them to dense tensors.
    """
    if per_image and q_group_size:
        raise ValueError("`per_image` and `q_group_size` both define groups; give one of them")
    if score_drop and not fused:
        raise ValueError("`score_drop` changes scores inside the attention; it needs `fused: true`")
    if visual is None:
        raise ValueError("this cache needs `visual`, the visual tokens; `find_visual` finds them")
    recipe = VisualQuantRecipe(
        nbits=nbits, value_nbits=value_nbits or nbits, rule=rule, q_group_size=q_group_size,
        per_image=per_image, axis_value=axis_value, rotated=rotate, score_drop=score_drop, guard=guard,
    )  # fmt: skip
    return make_cache(config, visual, mask, recipe, fused=fused)
