"""Gemma 3n (images of one size, sounds) and Gemma 4 (images, video frames and sounds of any size)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmrl.vision.models.family import Inputs, VLMFamily, linear, per_image, split_images

FEATURES, HEARD = "input_features", "input_features_mask"


def count_sounds(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the media features of Gemma 3n: a fixed number per image, and a fixed number per sound."""
    config: Any = core.config
    counts = per_image(lambda c: c.vision_soft_tokens_per_image)(core, inputs)
    if FEATURES in inputs:
        counts[config.audio_token_id] = len(inputs[FEATURES]) * config.audio_soft_tokens_per_image
    return counts


def split_sounds(media: Inputs) -> list[Inputs]:
    """Split media tensors along their first axes into images, then sounds."""
    sounds = {name: x for name, x in media.items() if name.startswith(FEATURES)}
    images = {name: x for name, x in media.items() if name not in sounds}
    parts = [{name: x[i : i + 1] for name, x in sounds.items()} for i in range(len(media.get(FEATURES, ())))]
    return [*(split_images(images) if images else []), *parts]


def as_weights(core: nn.Module, media: Inputs) -> dict[str, Tensor]:
    """Convert the spectra of sounds to the dtype of the audio tower, which does not convert them."""
    tower: Any = core.get_submodule("audio_tower")
    return {name: x.to(tower.dtype) if name == FEATURES else x for name, x in media.items()}


def count_pooled(core: nn.Module, inputs: Inputs) -> dict[int, int]:
    """Count the media features of Gemma 4 by token id, without padding.

    A square of patches of an image or video frame becomes one feature; so do four frames of a spectrum.
    """
    config: Any = core.config
    square = config.vision_config.pooling_kernel_size**2
    kinds = {config.image_token_id: "image_position_ids", config.video_token_id: "video_position_ids"}
    counts = {
        token: int(((inputs[name] >= 0).all(-1).sum(-1) // square).sum())
        for token, name in kinds.items()
        if name in inputs
    }
    return counts | ({config.audio_token_id: int(inputs[HEARD][:, ::4].sum())} if HEARD in inputs else {})


def split_frames(media: Inputs) -> list[Inputs]:
    """Split media tensors into single images and single videos, using each video's number of frames."""
    kinds = [{name: x for name, x in media.items() if ("video" in name) == video} for video in (False, True)]
    images, videos = kinds
    split = split_images(images) if images else []
    if videos:
        frames = videos["num_frames_per_video"]
        parts = {name: x.split(frames.tolist()) for name, x in videos.items() if x is not frames}
        parts["num_frames_per_video"] = frames.split(1)
        split += [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
    return split


def split_all(media: Inputs) -> list[Inputs]:
    """Split media tensors into images, videos and sounds, and remove the padding of sounds."""
    others = {name: x for name, x in media.items() if not name.startswith(FEATURES)}
    lengths = media[HEARD].sum(1).tolist() if HEARD in media else []
    sounds = [
        {name: media[name][i : i + 1, :length] for name in (FEATURES, HEARD)}
        for i, length in enumerate(lengths)
    ]
    return [*split_frames(others), *sounds]


def by_image(config: Any) -> bool:
    """Return whether an image's tokens attend to each other: true for 26B-A4B and 31B, not E2B and E4B."""
    return config.get_text_config().use_bidirectional_attention == "vision"


FAMILIES = {
    # The audio tower is frozen: in transformers 5.23, a padded sound makes all of its gradients NaN.
    "gemma3n": VLMFamily(
        linear,
        count_sounds,
        split_sounds,
        assemble=as_weights,
        sounds=lambda config: True,
        frozen="audio_tower",
    ),
    # Of the Gemma 4 models, E2B and E4B have an audio tower.
    "gemma4": VLMFamily(
        linear,
        count_pooled,
        split_all,
        "mm_token_type_ids",
        by_image,
        sounds=lambda config: config.audio_config is not None,
        eager=("audio_config",),
    ),
}
