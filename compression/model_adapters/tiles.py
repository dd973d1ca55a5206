"""Adapters of InternVL and SmolVLM, where every tile is one square patch grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, PatchGrids, project, sequence_positions
from mmrl.compression.model_adapters.llava import TEXT


def _internvl(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    return _squares(core, inputs, round(core.config.image_seq_length**0.5))


def _smolvlm(core: nn.Module, inputs: Mapping[str, Any]) -> dict[int, PatchGrids]:
    vision = core.config.vision_config
    return _squares(core, inputs, vision.image_size // vision.patch_size // core.config.scale_factor)


def _squares(core: nn.Module, inputs: Mapping[str, Any], side: int) -> dict[int, PatchGrids]:
    token = core.config.image_token_id
    return {token: [(side, side)] * (int((inputs["input_ids"] == token).sum()) // (side * side))}


def internvl(core: nn.Module) -> ModelAdapter:
    """Return the adapter of InternVL for its language model."""
    return replace(
        ModelAdapter(_internvl, project, sequence_positions),
        project=TEXT[core.config.get_text_config().model_type],
    )


def smolvlm(core: nn.Module) -> ModelAdapter:
    """Return the adapter of SmolVLM for its language model."""
    return replace(
        ModelAdapter(_smolvlm, project, sequence_positions),
        project=TEXT[core.config.get_text_config().model_type],
    )
