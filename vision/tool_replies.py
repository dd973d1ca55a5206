"""Replies of tools: how what a function returned becomes the texts, images and videos that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from mmrl.core import chat
from mmrl.core.modalities import MODALITIES, digest_of
from mmrl.core.types import Frames, Media, Part
from mmrl.data.media import MediaError, as_rgb, is_image, to_image
from mmrl.vision.media.media_reader import film
from mmrl.vision.media.media_root import one_frame

MAX_ERROR = 200  # characters of an error that a model reads
MAX_PARTS = 64  # texts, images and videos of a reply


class ToolFault(RuntimeError):
    """A tool raised an exception, timed out, or returned something else than texts and images."""


@dataclass(frozen=True)
class Answer:
    """What a tool returned, or the fault and its cause.

    Args:
        parts: Texts, images and videos; empty where these are more than may be shown.
        fault: What went wrong.
        cause: The exception.
        value: A result that is a number.
        shown: How many images and videos were returned.
    """

    parts: tuple[Part, ...] = ()
    fault: str = ""
    cause: BaseException | None = None
    value: float | None = None
    shown: int = 0


@dataclass(frozen=True)
class Limits:
    """The largest reply: characters, pixels of an image before it is decoded, and images that are decoded."""

    chars: int
    pixels: int
    images: int = MAX_PARTS


def as_answer(result: Any, name: str, limits: Limits) -> Answer:
    """Make the answer of a tool from what it returned; raises ToolFault as `as_parts` does.

    More images than may be shown are counted, and not decoded.
    """
    shown = sum(map(_is_shown, _items(result)))
    return Answer(() if shown > limits.images else as_parts(result, name, limits), shown=shown)


def as_parts(result: Any, name: str, limits: Limits) -> tuple[Part, ...]:
    """Convert what a tool returned to parts of a message; raises ToolFault for others, and for too many.

    That is a text, an image (of PIL, an array or a tensor), a content block of either or of a video (a list
    of images of one size, two a second), or a list of these; None, a number and a dictionary become a text.
    The texts are cut where they are longer in all than the limit.
    """
    parts, left = [], limits.chars
    for item in _items(result):
        match item:
            case str(text) | {"type": "text", "text": str(text)}:
                if left >= 0:  # else a text before was cut
                    parts.append(Part(text if len(text) <= left else text[:left] + " [...]", said=True))
                left -= len(text)
            case {"type": "image", "image": image} if is_image(image):
                parts.append(Part(media=_as_media(image, name, limits.pixels)))
            case {"type": "video", "video": [*images]} if images and all(map(is_image, images)):
                parts.append(Part(media=_as_video(images, name, limits.pixels)))
            case image if is_image(image):
                parts.append(Part(media=_as_media(image, name, limits.pixels)))
            case {"type": str(kind)} if medium := _other_medium(kind, item, name):
                parts.append(Part(media=medium))
            case _:
                raise ToolFault(
                    f"returned {type(item).__name__}; a tool returns a text, a PIL image, or a list of both"
                )
    return tuple(parts)


def _items(result: Any) -> Sequence[Any]:
    """List what a tool returned, numbers and other plain data as texts, as TRL does."""
    match result:
        case list() | tuple():
            if len(result) > MAX_PARTS:
                raise ToolFault(f"returned {len(result)} texts and images; the most is {MAX_PARTS}")
            return result
        case {"type": str(kind)} if kind == "text" or kind in MODALITIES:
            return [result]
        case None | Number() | Mapping():
            return [str(result)]
    return [result]


def _is_shown(item: Any) -> bool:
    return is_image(item) or (isinstance(item, Mapping) and item.get("type") in MODALITIES)


def _other_medium(kind: str, block: Mapping[str, Any], name: str) -> Media | None:
    """Make a medium of a kind that is neither image nor video; those have limits on their pixels."""
    if kind in ("image", "video") or kind not in MODALITIES:
        return None
    return MODALITIES[kind].from_value(block.get(kind), f"a {kind} from {name}")


def _as_video(images: Sequence[Any], name: str, max_pixels: int) -> Media:
    images = [_in_pillow(image, name) for image in images]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise ToolFault(f"returned a video whose images have {len(sizes)} sizes; make them equal")
    (size,) = sizes
    if not 0 < size[0] * size[1] * len(images) <= max_pixels:  # before any pixel is made
        raise ToolFault(
            f"returned a video of {len(images)} images of {size[0]}x{size[1]} pixels; the limit is "
            f"{max_pixels} in all"
        )
    frames = film(images)
    return Media("video", f"a video from {name}", lambda: frames)


def _as_media(image: Any, name: str, max_pixels: int) -> Media:
    image = _in_pillow(image, name)
    if not 0 < image.width * image.height <= max_pixels:  # before any pixel is made
        raise ToolFault(
            f"returned an image of {image.width}x{image.height} pixels; the limit is {max_pixels}"
        )
    try:
        frames = one_frame(as_rgb(image, f"an image from {name}"))
    except MediaError as error:
        raise ToolFault(f"returned an image that cannot be shown: {error}") from error
    return Media("image", f"an image from {name}", lambda: frames)


def _in_pillow(image: Any, name: str) -> Any:
    try:
        return to_image(image, f"an image from {name}")
    except MediaError as error:
        raise ToolFault(f"returned an image that cannot be shown: {error}") from error


def to_pil(argument: Any) -> Any:
    """Decode an image of the conversation for PIL; other arguments stay."""
    match argument:
        case Media():
            return chat.to_pil(argument.load().pixels[0])
    return argument


def shrunk(image: Media, most: int = 240) -> Media:
    """Copy an image with at most `most` pixels on a side: small enough to be kept with its row for a page."""
    frames = image.load()
    share = most / max(frames.pixels.shape[-2:])
    if share < 1:
        size = [max(1, round(side * share)) for side in frames.pixels.shape[-2:]]
        small = torch.nn.functional.interpolate(frames.pixels.float(), size, mode="bilinear", antialias=True)
        frames = Frames(small.round().clamp(0, 255).byte(), frames.times)
    return Media(image.kind, image.name, lambda: frames)


def content_of(part: Part) -> tuple:
    """Return what a part shows, so that parts that show the same are equal: a text, or a hash of pixels."""
    if part.media is None:
        return (part.text,)
    return part.media.kind, digest_of(part.media)


def one_line(error: object) -> str:
    """Write an error in one short line for the model to read."""
    return "Error: " + " ".join(str(error).split())[:MAX_ERROR]
