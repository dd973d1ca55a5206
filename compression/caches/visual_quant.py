"""Visual tokens in few bits, text and answers as they are (CalibQuant, arXiv 2502.14882, and variants of
ours)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt
from mmrl.config.registry import cache
from mmrl.kv_cache import quantization
from mmrl.kv_cache.blocks import CodedBlock, ExactBlock, collect
from mmrl.kv_cache.hf_cache import make_cache
from mmrl.kv_cache.layers import GrowingTail, Recipe, Stored
from mmrl.kv_cache.layout import Part, PromptLayout
from mmrl.kv_cache.row_groups import group_slots


@dataclass(frozen=True, kw_only=True)
class VisualQuantRecipe(Recipe):
    """How the visual tokens of a prompt are held. Nothing of it is seen by the text."""

    nbits: int
    value_nbits: int
    rule: quantization.Rule
    q_group_size: int
    per_image: bool
    axis_value: Literal["channel", "token"]
    rotate: bool
    score_drop: float
    guard: bool

    def store(self, keys: Tensor, values: Tensor, layout: PromptLayout) -> Stored:
        """Part a prompt (P, h, S, D) into text and groups of visual tokens."""
        places = self._places(layout, keys.device)
        text, groups = places["text"], places["groups"]
        flat = groups.flatten(1)

        def side(x: Tensor, name: quantization.Side, nbits: int) -> list[Part]:
            parts = [Part(ExactBlock(collect(x, text)), text, name="text")]
            if flat.shape[1]:
                parts.append(Part(self._block(x, groups, name, nbits), flat, visual=True, name="visual"))
            return parts

        tail = GrowingTail(layout.length)
        return side(keys, "keys", self.nbits), side(values, "values", self.value_nbits), tail

    def _block(
        self, x: Tensor, groups: Tensor, side: quantization.Side, nbits: int
    ) -> ExactBlock | CodedBlock:
        tokens = collect(x, groups.flatten(1))
        if nbits == 16:
            return ExactBlock(tokens)
        if self.rotate:
            tokens = tokens @ quantization.rotation(x.shape[-1], x.dtype, x.device)
        by_token = side == "values" and self.axis_value == "token"
        codes = quantization.quantize(
            tokens.unflatten(2, groups.shape[1:]),
            nbits,
            valid=(groups >= 0)[:, None, :, :, None],
            rule=self.rule,
            side=side,
            channels=x.shape[-1] if by_token else 0,
        )
        return CodedBlock(codes, self.rotate)

    def _places(self, layout: PromptLayout, device: torch.device) -> Mapping[str, Tensor]:
        """Find the slots of text (P, n) and of visual groups (P, E, n), once for all layers."""
        if not layout.made:
            visual, real = layout.visual.cpu(), layout.real.cpu()
            one = torch.zeros_like(visual, dtype=torch.int64)
            text = group_slots(real & ~visual, one).flatten(1)
            group = one
            if self.per_image:
                group = ((visual & ~torch.nn.functional.pad(visual, (1, -1))).cumsum(1) - 1).clamp(min=0)
            elif self.q_group_size:
                group = (visual.cumsum(1) - 1).clamp(min=0) // self.q_group_size
            layout.made = {"text": text.to(device), "groups": group_slots(visual, group).to(device)}
        return layout.made

    @property
    def calibrates(self) -> bool:
        """Tell whether visual scores are changed."""
        return self.score_drop != 0

    def calibrate(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Change visual scores before the softmax."""
        return quantization.calibrate(scores, valid, drop=self.score_drop, guard=self.guard)


@cache
def visual_quant(
    config: Any,
    visual: Tensor,
    mask: Tensor,
    *,
    nbits: Literal[1, 2, 4, 8] = 1,
    value_nbits: Literal[1, 2, 4, 8] | None = None,
    rule: quantization.Rule = "fitted",
    q_group_size: NonNegativeInt = 0,
    per_image: bool = False,
    axis_value: Literal["channel", "token"] = "channel",
    rotate: bool = False,
    score_drop: NonNegativeFloat = 0.0,
    guard: bool = True,
    fused: bool = True,
) -> Any:
    """Hold the visual tokens of prompts in `nbits` bits and everything else as it came, for one batch.

    `visual` and `mask` are (P, S) and say what is visual and what is no padding. Keys have one scale per
    channel, and values too unless `axis_value` is token; a group is all visual tokens of a prompt, those of
    one picture (`per_image`), or `q_group_size` of them. `value_nbits` gives values other bits than keys; 16
    leaves a side as it is. `rotate` spreads outliers over channels. CalibQuant as published is `rule: shrunk,
    score_drop: 3.0`, with the order of scores kept by `guard` (our reading); its first version is `rule:
    quantile`. Rows of one prompt share it. Pictures that come behind the first pass stay as they are. With
    `fused` attention reads codes; without, it gets dense tensors made anew in every step.
    """
    value_nbits = nbits if value_nbits is None else value_nbits
    for name, number in (("nbits", nbits), ("value_nbits", value_nbits)):
        if number != 16:
            quantization.check_bits(number, name)
    if rule not in quantization.Rule.__args__:
        raise ValueError(f"`rule` must be one of {', '.join(quantization.Rule.__args__)}, not '{rule}'")
    if per_image and q_group_size:
        raise ValueError("`per_image` and `q_group_size` both say what a group is; give one of them")
    if score_drop and not fused:
        raise ValueError("`score_drop` changes scores inside the attention; it needs `fused: true`")
    if visual is None:
        raise ValueError("`visual` must say which tokens are visual; `find_visual` reads it off the ids")
    recipe = VisualQuantRecipe(
        nbits=nbits,
        value_nbits=value_nbits,
        rule=rule,
        q_group_size=q_group_size,
        per_image=per_image,
        axis_value=axis_value,
        rotate=rotate,
        score_drop=score_drop,
        guard=guard,
    )
    return make_cache(config, PromptLayout(visual, mask), recipe, fused=fused)
