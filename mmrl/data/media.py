"""Opening untrusted image and video files: allowed folder, allowed formats, limits on size."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.types import Readable
from mmrl.data.fields import RowError

MAX_FILE_BYTES = 4 << 30
MAX_IMAGE_PIXELS = 100_000_000
# Not EPS, for which Pillow starts ghostscript, nor formats whose readers hardly anybody uses.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
ORIENTATION = 0x0112  # tag of EXIF
CHANNELS = (1, 3, 4)
# An address that holds a file in base64, or such text alone, told from a path by what PNG, JPEG, GIF and WebP
# begin with.
HELD = re.compile(r"(?P<address>data:\w+/[^,]*;base64,|(?=(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[\w+/=\s]{200}))")
# ffmpeg's names of containers. None of them reads other files: no playlists, lists of files or descriptions
# of streams (hls, concat, image2, dash, sdp), whatever a file is called.
CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"


class MediaError(RowError):
    """An image or a video that cannot be used. The message names the file."""


def held_or_named(text: str) -> bytes | str:
    """Give the bytes that a text holds in base64, after `data:` or alone, or the path that it names.

    `file://` before a path is left out. Raises `MediaError` for other addresses.
    """
    if held := HELD.match(text):
        with decoding(f"{text[:40]}...", "base64", (ValueError,)):
            return base64.b64decode(text[held.end("address") :])
    path = text.removeprefix("file://")
    if "://" in path:
        raise MediaError(f"'{path[:200]}' is an address, and nothing is downloaded; name a local file")
    return path


def locate(name: str, root: Path, max_bytes: int = MAX_FILE_BYTES) -> Path:
    """Resolve the path of a file inside `root`, links included.

    Raises `MediaError` if the path leaves the root, is no file, or the file is larger than `max_bytes`.
    """
    try:
        inside = root.resolve()
        path = (inside / name).resolve()
        exists = path.is_relative_to(inside) and path.is_file()
    except (OSError, ValueError) as error:  # too long, a loop of links, a zero byte
        raise MediaError(f"{name!r} in '{root}' cannot be the path of a file: {_reason(error)}") from error
    if not path.is_relative_to(inside):
        raise MediaError(f"the path '{name}' leaves its root '{root}'; paths must stay inside it")
    if not exists:
        raise MediaError(f"there is no file '{name}' in '{root}'")
    size = path.stat().st_size
    if size > max_bytes:
        raise MediaError(f"'{path}' has {size} bytes; the limit is {max_bytes} (max_file_bytes)")
    return path


@contextmanager
def decoding(name: str, wanted: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn errors of a reader inside the block into a `MediaError` with the file and the formats wanted."""
    try:
        yield
    except MediaError:
        raise
    except errors as error:
        raise MediaError(f"cannot decode '{name}': {_reason(error)}; wanted {wanted}") from error


def check_size(name: str, source: Any, max_pixels: int) -> None:
    """Raise `MediaError` where an image or a video of (`width`, `height`) has too many pixels."""
    if source.width * source.height > max_pixels:
        size = f"{source.width}x{source.height}"
        raise MediaError(f"'{name}' has {size} pixels; the limit is {max_pixels}; make it smaller")


@contextmanager
def opened_image(source: Path | bytes, name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[Any]:
    """Open a file or bytes as a Pillow image; every error inside the block becomes a `MediaError`."""
    from PIL import Image

    Image.init()
    formats = [form for form in IMAGE_FORMATS if form in Image.OPEN]  # AVIF is new in Pillow 11.3
    # Pillow's readers raise errors of any type where a file is damaged.
    with decoding(name, f"an image as {', '.join(IMAGE_FORMATS)}", (Exception,)), ExitStack() as stack:
        file = io.BytesIO(source) if type(source) is bytes else stack.enter_context(source.open("rb"))
        image = stack.enter_context(Image.open(file, formats=formats))
        check_size(name, image, max_pixels)
        yield image


def read_image(
    source: Path | bytes, name: str, max_pixels: int = MAX_IMAGE_PIXELS, *, transparent: bool = False
) -> Any:
    """Decode an image file as an upright 8-bit RGB image of Pillow, as `as_rgb` makes it."""
    with opened_image(source, name, max_pixels) as image:
        image.load()
        return as_rgb(image, name, transparent=transparent)


def as_rgb(image: Any, name: str, *, transparent: bool = False) -> Any:
    """Convert an image of Pillow to upright 8-bit RGB; transparent areas become white.

    16-bit grey is scaled so that its white becomes 255. 32-bit integers and floating point are errors,
    because files do not say which value is white. Of animations (GIF, WebP, APNG, AVIF) and of several pages
    the first counts. `transparent` keeps transparency: RGBA without a background. `name` is for errors.
    """
    from PIL import Image, ImageOps

    if getattr(image, "n_frames", 1) > 1:
        image.seek(0)
    upright = _in_8_bits(ImageOps.exif_transpose(image), image, name)
    if transparent:
        return upright.convert("RGBA")
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    return upright.convert("RGB")


def upright_size(source: Path | bytes | Readable, name: str) -> tuple[int, int]:
    """Read the width and height at which an image file is shown, without decoding its pixels."""
    data = source if isinstance(source, Path | bytes) else source.read()
    with opened_image(data, name) as image:
        turned = image.getexif().get(ORIENTATION, 1) in range(5, 9)  # by 90 degrees
        return image.size[::-1] if turned else image.size


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, or an array or a tensor of three dimensions."""
    match value:
        case object(getexif=_) | object(ndim=3):
            return True
    return False


def to_image(value: Any, name: str) -> Any:
    """Convert an image in memory to one of Pillow: an image of Pillow, an array or a tensor.

    An array is (height, width, channels) or (height, width), a tensor of torch may also be (channels, height,
    width), with 1, 3 or 4 channels. Values are uint8, uint16 of one channel, or floating point from 0 to 1.
    Raises `MediaError` for anything else; `name` is for errors.
    """
    import numpy
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    array = value.detach().cpu() if isinstance(value, Tensor) else value
    array = numpy.asarray(array.float() if array.dtype == torch.bfloat16 else array)
    if isinstance(value, Tensor) and array.ndim == 3 and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
        array = (array * 255).round().astype(numpy.uint8)
    if array.dtype == numpy.uint16 and array.ndim == 2:
        array = ((array.astype(numpy.int64) * 255 + 32767) // 65535).astype(numpy.uint8)
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in CHANNELS)
    if array.dtype != numpy.uint8 or not shaped:
        raise MediaError(
            f"'{name}' is an array {tuple(value.shape)} of {value.dtype}; wanted (height, width, 3), or of a "
            "tensor (3, height, width), of uint8 or from 0 to 1"
        )
    return Image.fromarray(numpy.ascontiguousarray(array))


def _in_8_bits(image: Any, file: Any, name: str) -> Any:
    """Scale 16-bit grey to 8 bits; `file` is the image as it was opened, which has the metadata."""
    import numpy
    from PIL import Image

    # Older versions of Pillow open 16-bit PNG as 32-bit integers, and all of them 16-bit PGM.
    if not image.mode.startswith("I;16") and not (image.mode == "I" and file.format in ("PNG", "PPM")):
        if image.mode in ("I", "F"):
            what = "32-bit integers" if image.mode == "I" else "floating-point numbers"
            raise MediaError(
                f"'{name}' holds {what}, and files do not say which value is white; save it with 8 or 16 bits"
            )
        return image
    values = numpy.array(image).astype(numpy.int64)
    bits, inverted = 16, False
    if getattr(file, "format", None) == "TIFF":
        # Tags BitsPerSample and PhotometricInterpretation, which is 0 where 0 is white.
        bits, inverted = file.tag_v2.get(258, (16,))[0], file.tag_v2.get(262) == 0
    white = (1 << bits) - 1  # of 16 bits 65535
    grey = (values.clip(0, white) * 255 + white // 2) // white
    scaled = Image.fromarray((255 - grey if inverted else grey).astype(numpy.uint8))
    clear = file.info.get("transparency")
    if clear is not None:  # of PNG: the one value of grey that is transparent
        scaled.putalpha(Image.fromarray(((values != clear) * 255).astype(numpy.uint8)))
    return scaled


@contextmanager
def opened_video(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[Any]:
    """Open a file as a PyAV container with a video stream; errors inside the block become a `MediaError`.

    Only formats that contain their media are opened, and no other file is ever read.
    """
    import av

    def refuse(url: str, flags: int, options: dict) -> Any:
        raise PermissionError(f"it refers to another file, '{url}'")

    options = {"format_whitelist": CONTAINERS}
    errors = (av.error.FFmpegError, OSError, ValueError, OverflowError, MemoryError)
    wanted = f"a video as {CONTAINERS.replace(',', ', ')}"
    # Titles in other encodings than UTF-8 are common, hence `metadata_errors`.
    with (
        decoding(str(path), wanted, errors),
        path.open("rb") as file,
        av.open(file, io_open=refuse, container_options=options, metadata_errors="replace") as container,
    ):
        if not container.streams.video:
            raise MediaError(f"'{path}' holds no video stream")
        codec = container.streams.video[0].codec_context
        if codec is None:
            raise MediaError(f"'{path}' holds a video in a codec that this build of ffmpeg does not know")
        check_size(str(path), codec, max_pixels)  # a damaged header can claim any size
        codec.options = {"max_pixels": str(max_pixels)}  # and a stream can grow later
        yield container


def is_turned(frame: Any) -> bool:
    """Whether a PyAV frame is displayed rotated by 90 degrees, so that width and height swap."""
    a, b, _, _ = _display_matrix(frame)
    return abs(b) > abs(a)


def upright(pixels: Tensor, frame: Any) -> Tensor:
    """Rotate and mirror (height, width, 3) pixels by the display matrix of their frame."""
    a, b, c, d = _display_matrix(frame)  # x goes to a x + c y, y to b x + d y
    if abs(b) > abs(a):  # turned: swap the axes, then at most mirror
        pixels, a, d = pixels.transpose(0, 1), c, b
    return pixels.flip([dim for dim, along in ((0, d), (1, a)) if along < 0])


def _display_matrix(frame: Any) -> tuple[int, int, int, int]:
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 1, 0, 0, 1
    # Rows (a, b, u), (c, d, v), (x, y, w) of 32-bit fixed-point numbers; only signs and sizes matter.
    a, b, _, c, d = struct.unpack("=9i", bytes(matrix))[:5]
    return a, b, c, d


def _reason(error: Exception) -> str:
    # Pillow names the buffer that it reads by its address, which differs between runs.
    text = re.sub(r" <_io\.[^>]*>", "", getattr(error, "strerror", None) or str(error))
    return " ".join(text.split()) or type(error).__name__
