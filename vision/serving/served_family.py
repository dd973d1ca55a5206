"""Format of a model family's media in requests to vLLM servers, and shared helpers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.core.modalities import MODALITIES
from mmrl.vision.models.family import Inputs
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder


@dataclass(frozen=True)
class Field:
    """A tensor of an item, and how the server combines it with the tensors of other items.

    Args:
        data: The tensor; a number if it is shared.
        how: "flat": items are concatenated along the first axis; "batched": items are stacked, so `data` has
            no axis of items; "shared": all items have the same value.
        on_cpu: Whether the server keeps the tensor in host memory, as it does grids, to compute positions.
    """

    data: Tensor | int
    how: Literal["flat", "batched", "shared"]
    on_cpu: bool = False

    @property
    def form(self) -> dict[str, Any]:
        """Return the tensor field in the form of vLLM's `MultiModalFieldElem`."""
        options: dict[str, Any] = {"keep_on_cpu": self.on_cpu}
        if self.how == "flat":
            assert isinstance(self.data, Tensor)
            options |= {"slices": [[0, len(self.data), None]], "dim": 0}
        if self.how == "shared":
            options |= {"batch_size": 1}
        return {"data": self.data, "field": [self.how, options]}


Fields = Callable[[PromptEncoder, Inputs, str], dict[str, Field]]


@dataclass(frozen=True)
class Item:
    """An input that a server encodes at once, at adjacent placeholders: an image, tile, video or frame.

    Args:
        modality: The server's type of input, `image` or `video`, which decides how positions are counted.
        fields: Maps argument names of vLLM's model to tensors.
        token: Id of the placeholder token.
        length: Number of placeholders, one for every feature.
    """

    modality: str
    fields: Mapping[str, Field]
    token: int
    length: int


def no_items(encoder: PromptEncoder, encoded: EncodedPrompt) -> list[Item]:
    """Return no items, for families without media."""
    return []


@dataclass(frozen=True)
class ServedFamily:
    """Rules that convert a model family's media to inputs of vLLM servers.

    A request contains for every item a hash of its content and of the version of the weights, and the range
    of its placeholders, which must have no gaps. The server computes positions from ranges and grids. So
    frames or tiles with text between them are separate items.

    Args:
        kinds: Maps each kind of media that can be sent to the modality of its items.
        items: Maps (encoder, prompt) to the items of the prompt. Items with the same
            placeholder token are in the order of the prompt.
        refused: Maps each kind of media that the family reads but cannot be sent to the reason.
        cause: Known reason why answers about media may differ from the policy's; empty: none.
        files: For placeholders with gaps, replaces `items`. Maps (encoder, prompt) to the token ids with one
            placeholder per image, and the images as PNG files. The server preprocesses the files, and
            must return the token ids of the prompt.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    items: Callable[[PromptEncoder, EncodedPrompt], list[Item]] = no_items
    refused: Mapping[str, str] = field(default_factory=dict)
    cause: str = ""
    files: Callable[[PromptEncoder, EncodedPrompt], tuple[Tensor, list[bytes]]] | None = None


IMAGES = {"image": "image"}
AS_IMAGES = {"image": "image", "video": "image"}  # frames are sent as images


def kind_of(name: str) -> str:
    """Return the kind of media that the name of a tensor contains; by default `image`."""
    return next((kind for kind in MODALITIES if kind in name), "image")


def item_of(encoder: PromptEncoder, part: Inputs, uid: str, fields: Fields, token: int | None = None) -> Item:
    """Create the item of one medium; `token`: its placeholder id, if not the default."""
    ((usual, length),) = family_of(encoder.core.config).features(encoder.core, part).items()
    modality = next((kind for name in part if (kind := kind_of(name)) != "image"), "image")
    return Item(modality, fields(encoder, part, uid), usual if token is None else token, length)


def split_items(fields: Fields) -> Callable[[PromptEncoder, EncodedPrompt], list[Item]]:
    """Return a function that creates an item for each medium that `VLMFamily.split` returns."""

    def items(encoder: PromptEncoder, encoded: EncodedPrompt) -> list[Item]:
        split = family_of(encoder.core.config).split
        assert split is not None
        return [item_of(encoder, part, encoded.uid, fields) for part in split(encoded.media)]

    return items


def one_tile(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    """Create the fields of an image or tile (1, channels, height, width), sent as an image of one tile."""
    return {"pixel_values": Field(part["pixel_values"], "flat"), "num_patches": one()}


def one() -> Field:
    """Return the tensor field for the number of tiles of an item, which is 1."""
    return Field(torch.tensor(1), "batched", on_cpu=True)


def patches(encoder: PromptEncoder, part: Inputs, uid: str) -> dict[str, Field]:
    """Create the fields of a medium: patches, one per row, as bytes; grids and seconds unchanged."""
    processor: Any = encoder.processor
    return {
        name: Field(as_bytes(processor.image_processor, value, uid), "flat")
        if name.startswith("pixel_values")
        else Field(value[0], "batched", on_cpu=True)
        for name, value in part.items()
    }


def as_bytes(processor: Any, patches: Tensor, uid: str) -> Tensor:
    """Undo the normalisation of patches (S, 3 * pixels), which the server repeats; return uint8.

    Raises ValueError if the patches are not normalised bytes of this image processor.
    """
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    shape = (1, len(processor.image_mean), 1)
    mean, std = (torch.tensor(v).view(shape) for v in (processor.image_mean, processor.image_std))
    channels = patches.float().view(len(patches), shape[1], -1)
    exact = (channels * std + mean) / scale
    levels = exact.round().clamp(0, 255)
    if (worst := float((exact - levels).abs().max())) > 0.05:
        raise ValueError(
            f"the pixels of prompt '{uid}' are no bytes in the normalisation of the image processor "
            f"(they miss them by up to {worst:.2g} of a level), which the server would repeat"
        )
    return levels.to(torch.uint8).view(patches.shape)
