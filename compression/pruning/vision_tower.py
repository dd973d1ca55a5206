"""What the features of a picture remember: the rasters they were made of, and what the vision tower looked
at.

`generate` encodes pictures ahead and hands their features on, repeated for beams, without the grids. So both
are written on the tensors of features themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.compression.model_adapters.adapter import Decoder, Rasters

KINDS = ("image", "video")


def encode(core: nn.Module, decoder: Decoder, kind: str, tower: bool, given: Mapping[str, Any]) -> Any:
    """Encode media as the model's class does, and note on the features of each what is asked later."""
    with _watching(core, decoder, tower and kind == "image") as noted:
        out = getattr(type(core), f"get_{kind}_features")(core, **given)
    features = out.pooler_output
    if torch.is_tensor(features):
        return out
    rasters = (
        decoder.rasters(core, given).get(getattr(core.config, f"{kind}_token_id"), [])
        if decoder.noted
        else []
    )
    rasters = iter(rasters)
    for number, feature in enumerate(features):
        feature.rasters = list(_consume(rasters, len(feature)))
        feature.tower = {name: value[number] for name, value in noted.items()}
    return out


def _consume(rasters: Iterator[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    while length > 0 and (one := next(rasters, None)) is not None:
        length -= one[0] * one[1]
        yield one


def encode_ahead(core: nn.Module, inputs: dict[str, Any]) -> None:
    """Encode the pictures of a call before it, as `generate` does, so that what was noted can be read."""
    if inputs.get("pixel_values") is None:
        return
    wanted = inspect.signature(core.get_image_features).parameters
    given = {name: inputs.pop(name) for name in list(inputs) if name in wanted and name != "return_dict"}
    inputs["mm_encoder_outputs"] = {"image": core.get_image_features(**given, return_dict=True)}


def noted_rasters(inputs: Mapping[str, Any], kind: str) -> Rasters:
    """Read the rasters that the features of a call remember."""
    return [one for feature in _features(inputs, kind) for one in getattr(feature, "rasters", [])]


def noted_tower(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read what the tower looked at: queries and keys, (pictures, 1 + patches, width)."""
    seen = [getattr(feature, "tower", {}) for feature in _features(inputs, "image")]
    return {name: torch.stack([one[name] for one in seen]) for name in (seen[0] if seen else ())}


def _features(inputs: Mapping[str, Any], kind: str) -> Any:
    encoded = (inputs.get("mm_encoder_outputs") or {}).get(kind)
    return [] if encoded is None else encoded.pooler_output


@contextmanager
def _watching(core: nn.Module, decoder: Decoder, wanted: bool) -> Iterator[dict[str, Tensor]]:
    """Take down queries and keys of the tower layer that ranks patches, if they are wanted."""
    noted: dict[str, Tensor] = {}
    if not wanted:
        yield noted
        return
    attn = decoder.ranker(core)
    hooks = [
        projection.register_forward_hook(lambda module, args, out, name=name: noted.__setitem__(name, out))
        for name, projection in (("q", attn.q_proj), ("k", attn.k_proj))
    ]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()
