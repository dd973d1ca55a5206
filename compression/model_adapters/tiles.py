"""InternVL and SmolVLM: every tile makes one square raster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.adapter import Decoder, Rasters, in_line, project
from mmrl.compression.model_adapters.llava import TEXT


def _internvl(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, Rasters]:
    return _squares(core, inputs, round(core.config.image_seq_length**0.5))


def _smolvlm(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, Rasters]:
    vision = core.config.vision_config
    return _squares(core, inputs, vision.image_size // vision.patch_size // core.config.scale_factor)


def _squares(core: nn.Module, inputs: Mapping[str, Any], side: int) -> dict[int, Rasters]:
    token = core.config.image_token_id
    return {token: [(side, side)] * (int((inputs["input_ids"] == token).sum()) // (side * side))}


def internvl(core: nn.Module) -> Decoder:
    """InternVL."""
    return replace(
        Decoder(_internvl, project, in_line), project=TEXT[core.config.get_text_config().model_type]
    )


def smolvlm(core: nn.Module) -> Decoder:
    """SmolVLM."""
    return replace(
        Decoder(_smolvlm, project, in_line), project=TEXT[core.config.get_text_config().model_type]
    )
