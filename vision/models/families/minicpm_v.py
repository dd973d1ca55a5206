"""MiniCPM-V 4.6 and 4.7: images and their slices in any size, and recurrent layers of Qwen3.5."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from mmrl.vision.models.families.qwen_vl import get_rope_index
from mmrl.vision.models.family import Inputs, VLMFamily, linear


def count(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count media features: one per 4 x 4 patches of an image or slice, or per 2 x 2 in the mode "4x"."""
    config: Any = core.config
    merged = 4 if config.downsample_mode == "4x" else 16
    sizes = {config.image_token_id: "target_sizes", config.video_token_id: "target_sizes_videos"}
    return {
        token: int((inputs[name].prod(-1) // merged).sum()) for token, name in sizes.items() if name in inputs
    }


def rows_first(inputs: Inputs) -> dict[str, Tensor]:
    """Permute pixels from (1, channels, patch size, rows) to (rows, channels, patch size)."""
    return {
        name: value[0].permute(2, 0, 1) if name.startswith("pixel_values") else value
        for name, value in inputs.items()
    }


def rows_last(core: nn.Module, media: Inputs) -> dict[str, Tensor]:
    """Permute pixels from (rows, channels, patch size) back to (1, channels, patch size, rows)."""
    return {
        name: value.permute(1, 2, 0)[None] if name.startswith("pixel_values") else value
        for name, value in media.items()
    }


def _number(processor: Any, ids: Tensor, text: str) -> tuple[str, dict[str, Any]]:
    """Number the media of a reply, continuing the conversation's numbers of each kind of media.

    The processor would number the media of every text from 0. Version 4.7 does not number videos. Returns
    the numbered text, and the option that turns the processor's numbering off.
    """
    if not processor.default_use_image_id:
        return text, {}
    begin, words = processor.image_id_start_token, (processor.image_token, processor.video_token)
    first, *kinds = processor.tokenizer.convert_tokens_to_ids([begin, *words])
    tokens = ids.tolist()
    after = [token for token in tokens if token == first or token in kinds]  # number tags and placeholders
    shown = [token for before, token in pairwise(after) if before == first]
    for word, kind in zip(words, kinds, strict=True):
        if any(processor._prepend_local_ids([word], [""], word)):
            head, *parts = text.split(word)
            known, end = shown.count(kind), processor.image_id_end_token
            text = head + "".join(f"{begin}{known + n}{end}{word}{part}" for n, part in enumerate(parts))
    return text, {"use_image_id": False}


# In version 4.7, an image and its slices share one grid of M-RoPE positions.
FAMILIES = {
    name: VLMFamily(positions, count, prepare=rows_first, assemble=rows_last, number=_number)
    for name, positions in (("minicpmv4_6", linear), ("minicpmv4_7", get_rope_index))
}
