"""Qwen2.5-Omni and Qwen3-Omni (thinkers): images, videos, sounds, and videos with their sounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmrl.vision.models.families.qwen_vl import count_grids, split_grids
from mmrl.vision.models.family import Inputs, VLMFamily

FEATURES, HEARD = "input_features", "feature_attention_mask"


def tmrope(core: nn.Module, inputs: Inputs, *, exact: bool) -> Tensor:
    """Compute TMRoPE positions (3, S) with the axes time, row and column (arXiv 2503.20215).

    Text and sound tokens take the next position on all axes. An image or video begins at the next position.
    A frame is at its seconds times `position_id_per_seconds`. The text continues after the largest position
    of any axis. The frames and the sound of a video begin at the same position. Their two start tokens share
    a position, and so do their two end tokens. The end tokens follow the largest position of the last run,
    either of frames or of sound, as in `get_rope_index` of transformers. That method is not used, because it
    cannot mix videos with and without sound in a prompt.

    Args:
        core: The model without its head.
        inputs: Outputs of the processor.
        exact: Whether to follow Qwen3-Omni: positions are float32 and not rounded down, and the two start
            tokens of a video with sound have different positions, as have its two end tokens.
    """
    config: Any = core.config
    dtype = torch.float32 if exact else torch.int64
    ids = inputs["input_ids"][0]
    video, sound = ids == config.video_token_id, ids == config.audio_token_id
    images, videos = (iter(inputs.get(f"{kind}_grid_thw", ())) for kind in ("image", "video"))
    seconds = iter(inputs.get("video_second_per_grid", ()))
    shown = (ids == config.image_token_id) | video
    begins = shown.clone()
    begins[:-1] |= (ids == config.audio_start_token_id)[:-1] & video[1:]
    parts, at, start = list[Tensor](), 0, torch.zeros((), dtype=dtype)
    while at < len(ids):
        heard = begins[at] and not shown[at]
        if not begins[at]:
            size = int(begins[at:].int().argmax()) if begins[at:].any() else len(ids) - at
            part = torch.arange(size).expand(3, -1) + start
        elif ids[at] == config.image_token_id:
            part = block(config, next(images), torch.zeros(()), dtype) + start
        elif video[at]:
            part = block(config, next(videos), next(seconds), dtype) + start
        else:
            both = (video | sound)[at + 1 :]
            size = int((~both).int().argmax())
            of_video, step = video[at + 1 : at + 1 + size], int(exact)
            first = start - 1 + step  # position of the second start token
            inner = torch.zeros(3, size, dtype=dtype)
            inner[:, of_video] = block(config, next(videos), next(seconds), dtype)
            inner[:, ~of_video] = torch.arange(size - int(of_video.sum()), dtype=dtype).expand(3, -1)
            inner += first + 1
            last = inner[:, int((of_video != of_video[-1]).nonzero()[-1]) + 1 :].max()
            ends = (last + 1 + torch.tensor([0, step])).expand(3, -1)
            part = torch.cat([first.expand(3, 1), inner, ends], 1)
        parts.append(part)
        # With sound, continue after the end token: frames beyond the end of the sound have larger positions.
        at, start = at + part.shape[1], part[:, -1].max() + 1 if heard else part.max() + 1
    return torch.cat(parts, 1)


def block(config: Any, grid: Tensor, seconds: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the positions (3, n) of n features of a grid, from 0 on; `seconds`: time between frames."""
    merge = config.vision_config.spatial_merge_size
    time = (torch.arange(int(grid[0])) * seconds.float() * config.position_id_per_seconds).to(dtype)
    return torch.cartesian_prod(time, *(torch.arange(int(side) // merge).to(dtype) for side in grid[1:])).T


def two_convolutions(config: Any, frames: Tensor) -> Tensor:
    """Count the features of sounds in Qwen2.5-Omni, 25 per second, from their numbers of 10 ms frames."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def in_windows(config: Any, frames: Tensor) -> Tensor:
    """Count the features of sounds in Qwen3-Omni: 13 per full window, and one per 8 remaining frames."""
    window = 2 * config.audio_config.n_window
    rest = frames % window
    for _ in range(3):  # three convolutions of stride 2
        rest = (rest - 1) // 2 + 1
    return rest + frames // window * 13


def _count(core: nn.Module, inputs: Inputs, *, of_sounds: Any) -> dict[int, int]:
    """Count media features by token id; `of_sounds` computes the count of a sound from its frames."""
    counts, config = count_grids(core, inputs), cast(Any, core.config)
    if HEARD in inputs:
        counts[config.audio_token_id] = int(of_sounds(config, inputs[HEARD].sum(1)).sum())
    return counts


def split(media: Inputs) -> list[Inputs]:
    """Split media tensors into images, videos and sounds, and remove the padding of sounds."""
    sounds = [
        {FEATURES: features[None, :, :length], HEARD: heard[None, :length]}
        for features, heard in zip(media.get(FEATURES, ()), media.get(HEARD, ()), strict=True)
        for length in [int(heard.sum())]
    ]
    return [*split_grids(media), *sounds]


def _adjust(processor: Any, inputs: dict[str, Tensor], media: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove the padding of sounds (to 300 s in Qwen2.5-Omni), and set each video's seconds per frame.

    The processor assumes one frame rate for all videos. Raises ValueError if all sounds of a Qwen3-Omni
    prompt are shorter than a window of its convolutions (a second). transformers pads windows to the longest
    of a batch without a mask, so the features of such sounds would depend on the other rows.
    """
    if HEARD in inputs:
        longest = int(inputs[HEARD].sum(1).max())
        window = 2 * getattr(processor, "n_window", 0)
        if longest < window:
            raise ValueError(
                f"the longest sound of a prompt lasts {longest / 100:g} s, and the features of this model "
                f"depend on other prompts below {window / 100:g} s; append silence"
            )
        inputs |= {name: inputs[name][..., :longest] for name in (FEATURES, HEARD)}
    if "video_second_per_grid" in inputs:
        frames = processor.video_processor.temporal_patch_size
        rates = [data.sampled_fps for data in media["videos_kwargs"]["video_metadata"]]
        inputs["video_second_per_grid"] = torch.tensor([frames / rate for rate in rates])
    return inputs


def family(of_sounds: Any, *, exact: bool) -> VLMFamily:
    count = partial(_count, of_sounds=of_sounds)
    return VLMFamily(partial(tmrope, exact=exact), count, split, adjust=_adjust, sounds=lambda config: True)


FAMILIES = {
    "qwen2_5_omni_thinker": family(two_convolutions, exact=False),
    "qwen3_omni_moe_thinker": family(in_windows, exact=True),
}
