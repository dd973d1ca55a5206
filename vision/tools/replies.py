"""Conversion of a tool's result to texts, images and videos that the model reads."""

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
from mmrl.data.media_reader import film
from mmrl.data.media_root import one_frame

MAX_ERROR = 200  # maximum length of an error message for the model, in characters
MAX_PARTS = 64  # maximum number of texts, images and videos per reply


class ToolFault(RuntimeError):
    """Error of a tool that raised an exception, timed out, or returned a result of an unsupported type."""


@dataclass(frozen=True)
class Answer:
    """The converted result of a tool, or its error.

    Args:
        parts: Texts, images and videos; empty if the result has more images and videos than allowed.
        fault: Error message; empty without an error.
        cause: The exception, if any.
        value: The result, if it is a number.
        shown: Number of images and videos in the result, also if they are not in `parts`.
    """

    parts: tuple[Part, ...] = ()
    fault: str = ""
    cause: BaseException | None = None
    value: float | None = None
    shown: int = 0


@dataclass(frozen=True)
class Limits:
    """Limits of a reply: characters, pixels per image (checked before decoding), and number of images."""

    chars: int
    pixels: int
    images: int = MAX_PARTS


def as_answer(result: Any, name: str, limits: Limits) -> Answer:
    """Convert the result of a tool to an answer; raise ToolFault for an unsupported type.

    If there are more images than allowed, they are counted but not decoded.
    """
    shown = sum(
        is_image(item) or (isinstance(item, Mapping) and item.get("type") in MODALITIES)
        for item in _items(result)
    )
    return Answer(() if shown > limits.images else as_parts(result, name, limits), shown=shown)


def as_parts(result: Any, name: str, limits: Limits) -> tuple[Part, ...]:
    """Convert the result of a tool to message parts; raise ToolFault for an unsupported type.

    A result is a text, an image (PIL, array or tensor), a content block with a text, an image or a video (a
    list of images of equal size, two per second), or a list of these. None, numbers and dictionaries are
    converted to text. Texts are truncated to `limits.chars` characters in total.
    """
    parts, left = [], limits.chars
    for item in _items(result):
        match item:
            case str(text) | {"type": "text", "text": str(text)}:
                if left >= 0:  # otherwise an earlier text was truncated
                    parts.append(Part(text if len(text) <= left else text[:left] + " [...]", quoted=True))
                left -= len(text)
            case {"type": "video", "video": [*images]} if images and all(map(is_image, images)):
                parts.append(Part(media=_to_media("video", images, name, limits.pixels)))
            case {"type": "image", "image": image} if is_image(image):
                parts.append(Part(media=_to_media("image", [image], name, limits.pixels)))
            case image if is_image(image):
                parts.append(Part(media=_to_media("image", [image], name, limits.pixels)))
            case {"type": str(kind)} if medium := _other_medium(kind, item, name):
                parts.append(Part(media=medium))
            case _:
                raise ToolFault(
                    f"returned {type(item).__name__}; a tool returns a text, a PIL image, or a list of both"
                )
    return tuple(parts)


def _items(result: Any) -> Sequence[Any]:
    """Return the items of a result as a list; numbers and other plain data become texts, as in TRL."""
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


def _other_medium(kind: str, block: Mapping[str, Any], name: str) -> Media | None:
    """Create a medium such as sound from a content block; return None for images and videos."""
    if kind in ("image", "video") or kind not in MODALITIES:
        return None
    return MODALITIES[kind].from_value(block.get(kind), f"a {kind} from {name}")


def _to_media(kind: str, images: Sequence[Any], name: str, max_pixels: int) -> Media:
    """Decode an image or a video; raise ToolFault, before decoding, if it has too many pixels."""
    what = "an image" if kind == "image" else "a video"
    try:
        images = [to_image(image, f"an image from {name}") for image in images]
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise ToolFault(f"returned a video whose images have {len(sizes)} sizes; make them equal")
        ((width, height),) = sizes
        if not 0 < width * height * len(images) <= max_pixels:
            of = "" if kind == "image" else f" of {len(images)} images"
            raise ToolFault(
                f"returned {what}{of} of {width}x{height} pixels; the limit is {max_pixels}"
                + (" in all" if of else "")
            )
        image = f"an image from {name}"
        frames = film(images) if kind == "video" else one_frame(as_rgb(images[0], image))
    except MediaError as error:
        raise ToolFault(f"returned an image that cannot be shown: {error}") from error
    return Media(kind, f"{what} from {name}", lambda: frames)


def to_pil(argument: Any) -> Any:
    """Decode an image of the conversation to a PIL image; return other arguments unchanged."""
    return chat.to_pil(argument.load().pixels[0]) if isinstance(argument, Media) else argument


def shrunk(image: Media, most: int = 240) -> Media:
    """Shrink an image to at most `most` pixels per side, small enough to be stored in a report."""
    frames = image.load()
    share = most / max(frames.pixels.shape[-2:])
    if share < 1:
        size = [max(1, round(side * share)) for side in frames.pixels.shape[-2:]]
        small = torch.nn.functional.interpolate(frames.pixels.float(), size, mode="bilinear", antialias=True)
        frames = Frames(small.round().clamp(0, 255).byte(), frames.times)
    return Media(image.kind, image.name, lambda: frames)


def content_of(part: Part) -> tuple:
    """Return a content key of a message part: its text or a hash of its pixels. Equal keys, equal content."""
    if part.media is None:
        return (part.text,)
    return part.media.kind, digest_of(part.media)


def one_line(error: object) -> str:
    """Format an error as a short line for the model."""
    return "Error: " + " ".join(str(error).split())[:MAX_ERROR]
