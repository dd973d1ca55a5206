"""Families of vision-language models: rotary positions and numbers of visual features.

Families are looked up by `model_type`. A model that is not listed gets one-dimensional positions, and only
its own forward pass checks the number of features. `check_family` rejects models that need other rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.kv_cache.layout import placeholders

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class VLMFamily:
    """Rules of a model family, for a model without its head (core) and processor outputs (inputs).

    Args:
        positions: Maps (core, inputs) to rotary positions (A, S) with A axes.
        features: Maps (core, inputs) to the number of visual features of each placeholder token id.
        split: Splits media tensors into images, then videos; None: they cannot be split.
        types: Name of the model argument with token types, if the tokens of an image attend to each other in
            both directions; empty otherwise.
    """

    positions: Callable[[nn.Module, Inputs], Tensor]
    features: Callable[[nn.Module, Inputs], dict[int, int]]
    split: Callable[[Inputs], list[Inputs]] | None = None
    types: str = ""


def _linear(core: nn.Module, inputs: Inputs) -> Tensor:
    """Return the positions 0, 1, 2, ... (1, S) of the tokens."""
    return torch.arange(inputs["input_ids"].shape[1])[None]


def _mrope(core: nn.Module, inputs: Inputs, rate: float | None = None) -> Tensor:
    """Compute M-RoPE positions (time, row, column) of Qwen2-VL and Qwen2.5-VL: (3, S).

    arXiv 2409.12191, 2502.13923. A text token takes the next number on all axes. An image or video of
    T x H x W features starts at the next number, and the text after it continues after the largest number of
    any axis. Qwen2.5-VL spaces the frames of a video by seconds, with a `rate` of tokens per second:
    floor(frame * seconds per frame * rate).

    The models were trained with this rule. `get_rope_index` of transformers is not used: versions 5.3 to 5.23
    continue after the height or width of a video, inside its time axis, and versions 4.50 to 5.21 floor the
    seconds before multiplying them.
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
            time = torch.arange(frames)
            if kinds[at] == 2 and rate is not None:
                time = (time * next(seconds, 1.0) * rate).long()
            # Grids count patches; a feature merges a square of patches.
            rows, columns = (torch.arange(side // vision.spatial_merge_size) for side in (height, width))
            part = torch.cartesian_prod(time, rows, columns).T
        parts.append(part + start)
        at, start = at + part.shape[1], int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


def _timed_mrope(core: nn.Module, inputs: Inputs) -> Tensor:
    return _mrope(core, inputs, core.config.vision_config.tokens_per_second)


def _get_rope_index(core: nn.Module, inputs: Inputs) -> Tensor:
    """Compute the M-RoPE positions of Qwen3-VL, Qwen3.5 and GLM-V with the model's own method: (3, S)."""
    if not inputs["mm_token_type_ids"].any():
        return _linear(core, inputs).expand(3, -1)
    wanted = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    # By keyword: the order of the arguments differs between families.
    return core.get_rope_index(**{name: inputs[name] for name in wanted if name in inputs})[0][:, 0]


def _count_grids(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the features of Qwen: T x H x W patches of every image or video, merged in squares."""
    config, merged = core.config, core.config.vision_config.spatial_merge_size**2
    grids = {config.image_token_id: "image_grid_thw", config.video_token_id: "video_grid_thw"}
    return {
        token: int((inputs[grid].prod(-1) // merged).sum()) for token, grid in grids.items() if grid in inputs
    }


def _count_images(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the features of GLM-V; raise ValueError for videos, whose frames use image placeholders."""
    if "video_grid_thw" in inputs:
        raise ValueError(
            f"videos cannot be read with models of type '{core.config.model_type}'; "
            "give their frames as images"
        )
    return _count_grids(core, inputs)


def _split_grids(media: Inputs) -> list[Inputs]:
    """Split Qwen's two tensors, the patches of all images and the patches of all videos, by medium."""
    split: list[Inputs] = []
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if name in media:
            grids = media[f"{kind}_grid_thw"]
            parts = {name: media[name].split(grids.prod(-1).tolist()), f"{kind}_grid_thw": grids.split(1)}
            if kind == "video" and "second_per_grid_ts" in media:
                parts["second_per_grid_ts"] = media["second_per_grid_ts"].split(1)
            split += [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    return split


def _split_images(media: Inputs) -> list[Inputs]:
    """Split tensors along their first axis, which counts images or tiles."""
    number = len(media["pixel_values"])
    return [{name: value[i : i + 1] for name, value in media.items()} for i in range(number)]


def _count_merged(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the features of Mistral 3: squares of patches of every image, without padding.

    Raises ValueError for a prompt with a single feature, of which transformers 5.23 loses the axis.
    """
    if "pixel_values" not in inputs:
        return {}
    config: Any = core.config
    side = config.vision_config.patch_size * config.spatial_merge_size
    count = int((inputs["image_sizes"] // side).prod(-1).sum())
    if count == 1 and "input_ids" in inputs:  # a whole prompt, and not one of its images
        raise ValueError(
            f"an image of at most {side} x {side} pixels cannot be read alone by models of type "
            f"'{config.model_type}'; enlarge it"
        )
    return {config.image_token_id: count}


def _count_shapes(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the features of LFM2-VL: patches of every image or tile, merged in squares, without padding."""
    if "pixel_values" not in inputs:
        return {}
    config: Any = core.config
    return {config.image_token_id: int((inputs["spatial_shapes"] // config.downsample_factor).prod(-1).sum())}


def _split_padded(media: Inputs) -> list[Inputs]:
    """Split images of different sizes, and remove their padding, so that equal images are equal tensors."""
    return [
        {"pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]}
        for pixels, size in zip(media["pixel_values"], media["image_sizes"], strict=True)
        for height, width in [size.tolist()]
    ]


def _per_image(each: Callable[[Any], int], axis: int = 0) -> Callable[[nn.Module, Inputs], dict[int, int]]:
    """Make the counter of a family in which every image or tile (on `axis`) has `each(config)` features."""

    def features(core: nn.Module, inputs: Inputs) -> dict[int, int]:
        if "pixel_values" not in inputs:
            return {}
        if "image_sizes" in inputs:  # a vision tower (Pixtral) that keeps image sizes
            patches = (inputs["image_sizes"] // core.config.vision_config.patch_size).prod(-1)
            return {core.config.image_token_id: int(patches.sum())}  # sizes before padding
        return {core.config.image_token_id: inputs["pixel_values"].shape[axis] * each(core.config)}

    return features


def _patches(config: Any) -> int:
    """Return the number of patches of an image that has the input size of the vision tower."""
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2


def _count_packed(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the packed features of LLaVA-OneVision by running the model's packing on zeros."""
    config, counts = core.config, {}
    if "pixel_values" in inputs:
        # A feature width of 1 is enough, because only lengths are used.
        tiles = [torch.zeros(tiles.shape[0], _patches(config), 1) for tiles in inputs["pixel_values"]]
        _, lengths = core.pack_image_features(
            tiles,
            inputs["image_sizes"],
            image_newline=torch.zeros(1),
            vision_aspect_ratio=config.vision_aspect_ratio,
        )
        counts[config.image_token_id] = int(torch.as_tensor(lengths).sum())
    if "pixel_values_videos" in inputs:
        videos, frames = inputs["pixel_values_videos"].shape[:2]
        # Bilinear pooling halves the sides, rounded up; one newline token ends every video.
        side = math.ceil(math.isqrt(_patches(config)) / 2)
        counts[config.video_token_id] = videos * (frames * side**2 + 1)
    return counts


def _count_tiles(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the features of LLaVA-NeXT: the image, and its tiles without padding, with newlines.

    The packing of the model runs on zeros of width 1, because only lengths are used.
    """
    if "pixel_values" not in inputs:
        return {}
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    model: Any = core
    config, sizes = model.config, inputs["image_sizes"]
    side, grids = config.vision_config.image_size, config.image_grid_pinpoints
    # Every image has the tiles that its size asks for; the rest of `pixel_values` is padding.
    tiles = [torch.zeros(image_size_to_num_patches(size, grids, side), _patches(config), 1) for size in sizes]
    _, lengths = model.pack_image_features(
        tiles, sizes, config.vision_feature_select_strategy, image_newline=torch.zeros(1)
    )
    return {config.image_token_id: int(lengths.sum())}


FAMILIES: dict[str, VLMFamily] = {
    "qwen2_vl": VLMFamily(_mrope, _count_grids, _split_grids),
    "qwen2_5_vl": VLMFamily(_timed_mrope, _count_grids, _split_grids),
    "qwen3_vl": VLMFamily(_get_rope_index, _count_grids, _split_grids),
    "qwen3_vl_moe": VLMFamily(_get_rope_index, _count_grids, _split_grids),
    "qwen3_5": VLMFamily(_get_rope_index, _count_grids, _split_grids),
    "qwen3_5_moe": VLMFamily(_get_rope_index, _count_grids, _split_grids),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v"), VLMFamily(_get_rope_index, _count_images, _split_grids)
    ),
    # One feature per patch, and one for the class token if it is used.
    "llava": VLMFamily(
        _linear,
        _per_image(lambda c: _patches(c) + (c.vision_feature_select_strategy == "full")),
        _split_images,
    ),
    "internvl": VLMFamily(_linear, _per_image(lambda c: c.image_seq_length), _split_images),
    # Pixel shuffle merges squares of patches; pixel values have the shape (1, tiles, ...).
    **dict.fromkeys(
        ("smolvlm", "idefics3"),
        VLMFamily(_linear, _per_image(lambda c: _patches(c) // c.scale_factor**2, axis=1)),
    ),
    "llava_onevision": VLMFamily(_linear, _count_packed),
    "deepseek_vl": VLMFamily(_linear, _per_image(_patches), _split_images),
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"),
        VLMFamily(_linear, _per_image(lambda c: _patches(c) // c.downsample_factor**2), _split_images),
    ),
    "lfm2_vl": VLMFamily(_linear, _count_shapes, _split_images),
    "mistral3": VLMFamily(_linear, _count_merged, _split_padded),
    "llava_next": VLMFamily(_linear, _count_tiles, _split_images),
    "gemma3": VLMFamily(
        _linear, _per_image(lambda c: c.mm_tokens_per_image), _split_images, "token_type_ids"
    ),
}


CONTINUED = ("qwen3_5", "qwen3_next")  # prefixes of model types whose recurrent state can be continued
TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # arguments of forward passes


def check_family(config: Any, core: type[nn.Module], *, text_only: bool = False) -> None:
    """Raise ConfigError for a model class whose inputs this library would compute wrongly.

    These classes are

    - models with recurrent layers, such as Mamba, except Qwen3.5 and Qwen3-Next, whose layers continue from a
      state with several tokens;
    - models that read images by an encoder or cross-attention, such as Florence-2 and Llama 3.2 Vision;
    - families that are not listed in `FAMILIES` but have positions of their own (M-RoPE), or attention that
      depends on token types, as in Gemma 3 among the tokens of an image;
    - models without a placeholder token for images.

    `core` is the class of the model without its head. Only the first point is checked if `text_only`.
    """
    if getattr(core, "_is_stateful", False) and not config.model_type.startswith(CONTINUED):
        raise ConfigError(
            f"layers of a model of type '{config.model_type}' keep a state, from which they are not known to "
            f"go on with all tokens of an answer at once; {' and '.join(CONTINUED)} are"
        )
    if text_only or config.model_type in FAMILIES:
        return
    takes = signature(core.forward).parameters
    apart = any(name.startswith(("decoder_", "cross_attention")) for name in takes)
    if apart or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"a model of type '{config.model_type}' reads images by an encoder or by cross-attention, and "
            "prompts are read here as one sequence with images in the place of tokens; name a model of the "
            f"types {', '.join(sorted(FAMILIES))}"
        )
    reads = [f"`{name}`" for name in TYPES_OF_TOKENS if name in takes]
    if hasattr(core, "get_rope_index"):
        reads = ["positions of its own (`get_rope_index`)"]
    if reads:
        # The other families have positions in a line and read no types.
        known = sorted(name for name, one in FAMILIES.items() if one.types or one.positions is not _linear)
        raise ConfigError(
            f"a model of type '{config.model_type}' reads {' and '.join(reads)}, which is known of "
            f"{', '.join(known)} only; it would be read otherwise than it was trained. Add the "
            "type to `mmrl.vision.models.model_families.FAMILIES`, as docs/howto/model.md shows"
        )
    if not placeholders(config):
        raise ConfigError(
            f"the configuration of a model of type '{config.model_type}' names no token that stands for an "
            f"image (`image_token_id`); name a model of the types {', '.join(sorted(FAMILIES))}"
        )


def family_of(config: Any) -> VLMFamily:
    """Look up the family of a model by `model_type`."""
    return FAMILIES.get(config.model_type, VLMFamily(_linear, lambda core, inputs: {}))


def num_positions(config: Any) -> int:
    """Return the number of positions that a model supports, with rotary scaling; 0 if unknown."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 0
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaled in (scaling, *(value for value in scaling.values() if isinstance(value, Mapping))):
        factor = scaled.get("factor") or 1
        limit = max(limit, int((scaled.get("original_max_position_embeddings") or limit) * factor))
    return limit


def check_length(length: int, limit: int) -> None:
    """Raise ValueError if a prompt of this length leaves no position for an answer; `limit` 0: no limit."""
    if limit and length >= limit:
        raise ValueError(
            f"it takes {length} positions, and the model has {limit}, answers included; shorten it"
        )


def token_types(config: Any, ids: Tensor) -> Tensor:
    """Return token types in the shape of `ids`: a number per kind of media at placeholders, 0 for text."""
    types = torch.zeros_like(ids)
    for kind, token in placeholders(config).items():
        types[ids == token] = MODALITIES[kind].token_type
    return types


def type_arguments(config: Any, ids: Tensor) -> dict[str, Tensor]:
    """Make the argument with token types (N, S), if attention of the model family depends on them."""
    name = family_of(config).types
    return {name: token_types(config, ids)} if name else {}
