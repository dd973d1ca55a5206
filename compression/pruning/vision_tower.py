"""Patch grids and class-token attention, attached to the image features of the vision tower.

`generate` encodes images first and passes their features on, repeated for beams, without the grids. So both
are stored as attributes of the feature tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import ModelAdapter, PatchGrids

KINDS = ("image", "video")


def encode(core: nn.Module, adapter: ModelAdapter, kind: str, tower: bool, inputs: Mapping[str, Any]) -> Any:
    """Encode media, and attach patch grids and tower queries and keys to the features."""
    with _recording(core, adapter, tower and kind == "image") as recorded:
        out = getattr(type(core), f"get_{kind}_features")(core, **inputs)
    features = out.pooler_output
    if torch.is_tensor(features):
        return out
    grids = (
        adapter.grids(core, inputs).get(getattr(core.config, f"{kind}_token_id"), []) if adapter.noted else []
    )
    grids = iter(grids)
    for number, feature in enumerate(features):
        feature.grids = list(_consume(grids, len(feature)))
        feature.tower = {name: value[number] for name, value in recorded.items()}
    return out


def _consume(grids: Iterator[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    while length > 0 and (grid := next(grids, None)) is not None:
        length -= grid[0] * grid[1]
        yield grid


def encode_ahead(core: nn.Module, inputs: dict[str, Any]) -> None:
    """Encode the images of a call first, as `generate` does, so that attached values can be read."""
    if inputs.get("pixel_values") is None:
        return
    wanted = inspect.signature(core.get_image_features).parameters
    arguments = {name: inputs.pop(name) for name in list(inputs) if name in wanted and name != "return_dict"}
    inputs["mm_encoder_outputs"] = {"image": core.get_image_features(**arguments, return_dict=True)}


def encoded_grids(inputs: Mapping[str, Any], kind: str) -> PatchGrids:
    """Return the patch grids that are attached to the features of a call."""
    return [grid for feature in _features(inputs, kind) for grid in getattr(feature, "grids", [])]


def recorded_tower(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return queries and keys of the vision tower: (images, 1 + patches, width)."""
    seen = [getattr(feature, "tower", {}) for feature in _features(inputs, "image")]
    return {name: torch.stack([tensors[name] for tensors in seen]) for name in (seen[0] if seen else ())}


def _features(inputs: Mapping[str, Any], kind: str) -> Any:
    encoded = (inputs.get("mm_encoder_outputs") or {}).get(kind)
    return [] if encoded is None else encoded.pooler_output


@contextmanager
def _recording(core: nn.Module, adapter: ModelAdapter, wanted: bool) -> Iterator[dict[str, Tensor]]:
    """Record queries and keys of the tower layer that ranks patches, if wanted."""
    recorded: dict[str, Tensor] = {}
    if not wanted:
        yield recorded
        return
    attn = adapter.class_token_attention(core)
    hooks = [
        projection.register_forward_hook(lambda module, args, out, name=name: recorded.__setitem__(name, out))
        for name, projection in (("q", attn.q_proj), ("k", attn.k_proj))
    ]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
