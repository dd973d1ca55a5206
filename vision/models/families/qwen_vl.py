"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: M-RoPE positions, and grids of merged patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear


def mrope(core: nn.Module, inputs: Inputs, rate: float | None = None, steps: int = 1) -> Tensor:
    """Compute M-RoPE positions (3, S), time, row and column, of Qwen2-VL, Qwen2.5-VL and Ernie 4.5-VL.

    arXiv 2409.12191, 2502.13923. A text token takes the next position on all axes. An image or video
    of T x H x W features starts at the next position. The text continues after the largest position of
    any axis. Qwen2.5-VL spaces the frames of a video by seconds, with a `rate` of tokens per second:
    floor(frame * seconds per frame * rate). Ernie merges `steps` frames of a video into one.

    The models were trained with this rule. `get_rope_index` of transformers is not used: its versions 5.3 to
    5.23 continue after the height or width of a video, so that text overlaps the times of later frames, and
    versions 4.50 to 5.21 floor the seconds before multiplying them.
    """
    vision = core.config.vision_config
    grids = {1: iter(inputs.get("image_grid_thw", ())), 2: iter(inputs.get("video_grid_thw", ()))}
    seconds = iter(inputs.get("second_per_grid_ts", ()))
    kinds, parts, at, start = inputs["mm_token_type_ids"][0].tolist(), [], 0, 0
    while at < len(kinds):
        if kinds[at] == 0:  # 0 is text, 1 an image, 2 a video
            text = next((i for i in range(at, len(kinds)) if kinds[i]), len(kinds)) - at
            part = torch.arange(text).expand(3, -1)
        else:
            frames, height, width = next(grids[kinds[at]]).tolist()
            time = torch.arange(frames // (steps if kinds[at] == 2 else 1))
            if kinds[at] == 2 and rate is not None:
                time = (time * next(seconds, 1.0) * rate).long()
            # Convert grids of patches to grids of features (merged squares of patches).
            rows, columns = (torch.arange(side // vision.spatial_merge_size) for side in (height, width))
            part = torch.cartesian_prod(time, rows, columns).T
        parts.append(part + start)
        at, start = at + part.shape[1], int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def timed_mrope(core: nn.Module, inputs: Inputs) -> Tensor:
    return mrope(core, inputs, core.config.vision_config.tokens_per_second)


def get_rope_index(core: nn.Module, inputs: Inputs) -> Tensor:
    """Compute M-RoPE positions (3, S) with `get_rope_index` of Qwen3-VL, Qwen3.5, GLM-V or MiniCPM-V 4.7."""
    if not inputs["mm_token_type_ids"].any():
        return linear(core, inputs).expand(3, -1)
    grids = ("image_grid_thw", "video_grid_thw", "target_sizes", "target_sizes_videos")
    wanted = ("input_ids", "mm_token_type_ids", *grids)
    # Use keyword arguments, because their order differs between families.
    return core.get_rope_index(**{name: inputs[name] for name in wanted if name in inputs})[0][:, 0]


def count_grids(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the media features of Qwen by token id: T x H x W patches, merged in squares."""
    config, merged = core.config, core.config.vision_config.spatial_merge_size**2
    grids = {config.image_token_id: "image_grid_thw", config.video_token_id: "video_grid_thw"}
    return {
        token: int((inputs[grid].prod(-1) // merged).sum()) for token, grid in grids.items() if grid in inputs
    }


def split_grids(media: Inputs) -> list[Inputs]:
    """Split the patch tensors of Qwen (one for all images, one for all videos) into single media."""
    split: list[Inputs] = []
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if name in media:
            grids = media[f"{kind}_grid_thw"]
            parts = {name: media[name].split(grids.prod(-1).tolist()), f"{kind}_grid_thw": grids.split(1)}
            for seconds in {"second_per_grid_ts", "video_second_per_grid"} & media.keys():
                if kind == "video":
                    parts[seconds] = media[seconds].split(1)
            split += [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    return split


FAMILIES = {
    "qwen2_vl": VLMFamily(mrope, count_grids, split_grids),
    "qwen2_5_vl": VLMFamily(timed_mrope, count_grids, split_grids),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        VLMFamily(get_rope_index, count_grids, split_grids),
    ),
}
