"""The rules of a family of vision-language models, and functions that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.vision.models.image_rules import ImageRules

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class VLMFamily:
    """Rules of a model family; `core` is a model without its head, `inputs` are processor outputs.

    Args:
        positions: Maps (core, inputs) to rotary positions (A, S) of S tokens on A axes.
        features: Maps (core, inputs) to a dictionary from media placeholder token ids to numbers of features.
        split: Splits media tensors into a list of images, then videos, then sounds. None: not possible.
        types: Name of the model argument with token types, if the tokens of an image attend to each other in
            both directions; empty otherwise.
        reads_types: Maps a config to whether its model reads the argument `types`; by default, all do.
        kinds: Maps (config, token ids) to the values of `types`. None: 0 for text, and one number per kind of
            media at its placeholders.
        experts: Maps (config, token ids) to forward arguments with which the model selects experts by kind of
            token (text, image, video).
        prepare: Converts processor outputs so that the first axis of media tensors counts images, tiles or
            patches. Then the tensors of several prompts can be concatenated.
        assemble: Maps (core, concatenated media tensors) to forward arguments of the model.
        number: Continues the numbering of media, if the processor numbers them. Maps (processor, token ids of
            a conversation, text of a reply) to the numbered text and options of the processor.
        prefix_lm: Whether prompt tokens attend to each other; `types` are 0 in the prompt and 1 after it.
        chat_template: Chat template to use if the processor has none.
        core: Makes the model without its head, if transformers has no class for it.
        sounds: Maps a config to whether its model reads sounds; `features` then counts their features, too.
        adjust: Corrects outputs of the processor: maps (processor, outputs, media arguments) to new outputs.
        media_in_replies: Whether replies after an answer may hold media. False if they change earlier states.
        eager: Sub-configs, such as `audio_config`, of towers that support only eager attention.
        frozen: Name of a submodule that is never trained, such as a VQ autoencoder; or empty.
        images: Rules of a model that writes images as tokens.
        model: Import path of the class to load instead of that of transformers; or empty.
    """

    positions: Callable[[nn.Module, Inputs], Tensor]
    features: Callable[[nn.Module, Inputs], dict[int, int]]
    split: Callable[[Inputs], list[Inputs]] | None = None
    types: str = ""
    reads_types: Callable[[Any], bool] = lambda config: True
    kinds: Callable[[Any, Tensor], Tensor] | None = None
    experts: Callable[[Any, Tensor], dict[str, Tensor]] = lambda config, ids: {}
    prepare: Callable[[Inputs], dict[str, Tensor]] = dict
    assemble: Callable[[nn.Module, Inputs], dict[str, Tensor]] = lambda core, media: dict(media)
    number: Callable[[Any, Tensor, str], tuple[str, dict[str, Any]]] = lambda processor, ids, text: (text, {})
    prefix_lm: bool = False
    chat_template: str = ""
    core: Callable[[nn.Module], Any] | None = None
    sounds: Callable[[Any], bool] = lambda config: False
    adjust: Callable[[Any, dict[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] = (
        lambda processor, inputs, media: inputs
    )
    media_in_replies: bool = True
    eager: tuple[str, ...] = ()
    frozen: str = ""
    images: ImageRules | None = None
    model: str = ""


class FromConfig:
    """Mixin of model classes that are loaded in place of the automatic classes of transformers."""

    @classmethod
    def from_config(cls: Any, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        """Create a model with random weights."""
        return cls._from_config(config, **options)


def linear(core: nn.Module, inputs: Inputs) -> Tensor:
    """Return the positions 0, 1, 2, ... of S tokens in the shape (1, S)."""
    return torch.arange(inputs["input_ids"].shape[1])[None]


def split_images(media: Inputs) -> list[Inputs]:
    """Split media tensors along their first axis: one dictionary per image or tile."""
    number = len(media["pixel_values"])
    return [{name: value[i : i + 1] for name, value in media.items()} for i in range(number)]


def per_image(each: Callable[[Any], int], axis: int = 0) -> Callable[[nn.Module, Inputs], dict[int, int]]:
    """Create a counter of `each(config)` features per image or tile along `axis` of the pixel values."""

    def features(core: nn.Module, inputs: Inputs) -> dict[int, int]:
        if "pixel_values" not in inputs:
            return {}
        if "image_sizes" in inputs:  # a vision tower (Pixtral) that keeps image sizes
            patches = (inputs["image_sizes"] // core.config.vision_config.patch_size).prod(-1)
            return {core.config.image_token_id: int(patches.sum())}  # patches of the unpadded sizes
        return {core.config.image_token_id: inputs["pixel_values"].shape[axis] * each(core.config)}

    return features


def patches(config: Any) -> int:
    """Return the number of patches of an image that has the input size of the vision tower."""
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2
