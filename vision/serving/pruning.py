"""Prompts for vLLM servers that drop tokens of videos (`--video-pruning-rate`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.vision.models.processor import EncodedPrompt

# Qwen3-VL is missing: its prompts contain the times of the remaining frames, which only the server knows.
PRUNED = ("qwen2_5_vl",)


def check_pruning(config: Any) -> None:
    """Raise `ConfigError` for a model whose videos vLLM cannot prune if they are sent as tensors."""
    if config.model_type not in PRUNED:
        raise ConfigError(
            f"`video_pruning_rate` needs a model of type {' or '.join(PRUNED)}, not '{config.model_type}'"
        )


def kept(tokens: int, frames: int, rate: float) -> int:
    """Return how many tokens of a video remain on the server: at least those of one frame."""
    return max(tokens // frames, int(tokens * (1 - rate)))


def without_pruned(request: Mapping[str, Any], encoded: EncodedPrompt, rate: float) -> dict[str, Any]:
    """Remove from a request one placeholder per video token that the server will drop.

    Only the server knows which tokens remain; their number follows from the size of the video.

    Args:
        request: A request of `wire.request_of`.
        encoded: The prompt of the request.
        rate: Fraction of the tokens that are dropped, in [0, 1).
    """
    spans = request.get("features", {}).get("mm_placeholders", {})
    if not rate or not spans.get("video"):
        return dict(request)
    ids, places = (
        list(request["token_ids"]),
        {kind: [dict(span) for span in of] for kind, of in spans.items()},
    )
    frames = encoded.media["video_grid_thw"][:, 0].tolist()
    counted = {id(span): number for span, number in zip(places["video"], frames, strict=True)}
    removed = 0
    for span in sorted((span for of in places.values() for span in of), key=lambda span: span["offset"]):
        span["offset"] -= removed
        if number := counted.get(id(span)):
            fewer = kept(span["length"], number, rate)
            del ids[span["offset"] + fewer : span["offset"] + span["length"]]
            removed, span["length"] = removed + span["length"] - fewer, fewer
    return {**request, "token_ids": ids, "features": {**request["features"], "mm_placeholders": places}}
