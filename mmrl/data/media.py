"""Safe reading of untrusted image and video files: limits on folder, format and size."""

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
# EPS is excluded because Pillow starts ghostscript for it; so are formats whose readers are rarely used.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
ORIENTATION = 0x0112  # EXIF tag of the image orientation
CHANNELS = (1, 3, 4)
DATA_URL = re.compile(r"data:\w+/[^,]*;base64,")
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{200}|[A-Za-z0-9+/\s]+=*\s*$")
# First bytes of PNG, JPEG, GIF, WebP and BMP (in which four bytes are reserved and 0).
MAGIC = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff[\xc0-\xfe]|GIF8[79]a|RIFF.{4}WEBP|BM.{4}\0{4}", re.DOTALL
)
# Allowed containers, by their ffmpeg names. They cannot refer to other files, unlike playlists and stream
# descriptions (hls, concat, image2, dash, sdp).
CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif"


class MediaError(RowError):
    """Error for a media file that cannot be used. The message names the file."""


def held_or_named(text: str) -> bytes | str:
    """Decode a `data:` URL or an image in base64 to bytes; return other text as a path, without `file://`.

    Raises `MediaError` for other URLs, since nothing is downloaded.
    """
    url, head = DATA_URL.match(text), "".join(text[:200].split()).rstrip("=")
    # 200 characters of base64 are no path: a wrong one after them is an error.
    if url or (BASE64.match(text) and MAGIC.match(base64.b64decode(head[: len(head) // 4 * 4]))):
        with decoding(f"{text[:40]}...", "base64", (ValueError,)):
            compact = "".join(text[url.end() if url else 0 :].split()).rstrip("=")
            return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    path = text.removeprefix("file://")
    if "://" in path:
        raise MediaError(f"'{path[:200]}' is an address, and nothing is downloaded; name a local file")
    return path


def locate(name: str, root: Path, max_bytes: int = MAX_FILE_BYTES) -> Path:
    """Resolve the path of a file inside `root`; symbolic links are followed.

    Raises `MediaError` if the path leaves the root, is not a file, or the file is larger than `max_bytes`.
    """
    try:
        folder = root.resolve()
        path = (folder / name).resolve()
        exists = path.is_relative_to(folder) and path.is_file()
    except (OSError, ValueError) as error:  # too long, a loop of links, a zero byte
        raise MediaError(f"{name!r} in '{root}' cannot be the path of a file: {_reason(error)}") from error
    if not path.is_relative_to(folder):
        raise MediaError(f"the path '{name}' leaves its root '{root}'; paths must stay inside it")
    if not exists:
        raise MediaError(f"there is no file '{name}' in '{root}'")
    size = path.stat().st_size
    if size > max_bytes:
        raise MediaError(f"'{path}' has {size} bytes; the limit is {max_bytes} (max_file_bytes)")
    return path


@contextmanager
def decoding(name: str, wanted: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Convert `errors` inside the block to a `MediaError` with the file `name` and the `wanted` formats."""
    try:
        yield
    except MediaError:
        raise
    except errors as error:
        raise MediaError(f"cannot decode '{name}': {_reason(error)}; wanted {wanted}") from error


def check_size(name: str, source: Any, max_pixels: int) -> None:
    """Raise `MediaError` if an object with `width` and `height` has too many pixels."""
    if source.width * source.height > max_pixels:
        size = f"{source.width}x{source.height}"
        raise MediaError(f"'{name}' has {size} pixels; the limit is {max_pixels}; make it smaller")


@contextmanager
def opened_image(source: Path | bytes, name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[Any]:
    """Open a file or bytes as a PIL image; every error inside the block becomes a `MediaError`."""
    from PIL import Image

    Image.init()
    formats = [form for form in IMAGE_FORMATS if form in Image.OPEN]  # AVIF is new in Pillow 11.3
    # Pillow raises errors of any type for damaged files.
    with decoding(name, f"an image as {', '.join(IMAGE_FORMATS)}", (Exception,)), ExitStack() as stack:
        file = io.BytesIO(source) if type(source) is bytes else stack.enter_context(source.open("rb"))
        image = stack.enter_context(Image.open(file, formats=formats))
        check_size(name, image, max_pixels)
        yield image


def read_image(
    source: Path | bytes, name: str, max_pixels: int = MAX_IMAGE_PIXELS, *, transparent: bool = False
) -> Any:
    """Decode a file or bytes to an upright 8-bit RGB image of PIL, as `as_rgb` does."""
    with opened_image(source, name, max_pixels) as image:
        image.load()
        return as_rgb(image, name, transparent=transparent)


def as_rgb(image: Any, name: str, *, transparent: bool = False) -> Any:
    """Convert a PIL image to upright 8-bit RGB on a white background.

    16-bit grey is scaled so that its white becomes 255. 32-bit integers and floating point numbers raise
    `MediaError`, because files do not define which value is white. Animations and documents give their first
    frame or page.

    Args:
        image: The image.
        name: Name in errors.
        transparent: Return RGBA, without a background.
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
    """Read the width and height of the upright image without decoding its pixels."""
    data = source if isinstance(source, Path | bytes) else source.read()
    with opened_image(data, name) as image:
        rotated = image.getexif().get(ORIENTATION, 1) in range(5, 9)  # by 90 degrees
        return image.size[::-1] if rotated else image.size


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image, or an array or a tensor of three dimensions."""
    return hasattr(value, "getexif") or getattr(value, "ndim", None) == 3


def to_image(value: Any, name: str) -> Any:
    """Convert a PIL image, an array or a tensor to a PIL image.

    An array is (height, width, channels) or (height, width); a tensor may also be (channels, height, width).
    Channels are 1, 3 or 4. Values are uint8, uint16 of one channel, or floating point from 0 to 1. Raises
    `MediaError` for anything else; `name` is for errors.
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
    """Scale 16-bit grey to 8 bits; `file` is the image before rotation, because only it has the metadata."""
    import numpy
    from PIL import Image

    # Old versions of Pillow open 16-bit PNG as 32-bit integers; all versions do so with 16-bit PGM.
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
        # TIFF tags 258 (BitsPerSample) and 262 (PhotometricInterpretation; 0: the value 0 is white).
        bits, inverted = file.tag_v2.get(258, (16,))[0], file.tag_v2.get(262) == 0
    white = (1 << bits) - 1  # 65535 for 16 bits
    grey = (values.clip(0, white) * 255 + white // 2) // white
    scaled = Image.fromarray((255 - grey if inverted else grey).astype(numpy.uint8))
    clear = file.info.get("transparency")
    if clear is not None:  # the grey value that a PNG declares transparent
        scaled.putalpha(Image.fromarray(((values != clear) * 255).astype(numpy.uint8)))
    return scaled


@contextmanager
def opened_container(source: Path | bytes, name: str, formats: str, wanted: str) -> Iterator[Any]:
    """Open a file or bytes as a PyAV container of allowed `formats` (names of ffmpeg, with commas).

    Formats that refer to other files are refused. Errors inside the block become a `MediaError`.
    """
    import av

    def refuse(url: str, flags: int, options: dict) -> Any:
        raise PermissionError(f"it refers to another file, '{url}'")

    options = {"format_whitelist": formats}
    errors = (av.error.FFmpegError, OSError, ValueError, OverflowError, MemoryError)
    # `metadata_errors`: tolerate titles that are not UTF-8, which are common.
    with (
        decoding(name, f"{wanted} as {formats.replace(',', ', ')}", errors),
        io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
        av.open(file, io_open=refuse, container_options=options, metadata_errors="replace") as container,
    ):
        yield container


@contextmanager
def opened_video(path: Path, max_pixels: int = MAX_IMAGE_PIXELS) -> Iterator[Any]:
    """Open a file as a PyAV container with a video stream; errors inside the block become a `MediaError`."""
    with opened_container(path, str(path), CONTAINERS, "a video") as container:
        if not container.streams.video:
            raise MediaError(f"'{path}' holds no video stream")
        codec = container.streams.video[0].codec_context
        if codec is None:
            raise MediaError(f"'{path}' holds a video in a codec that this build of ffmpeg does not know")
        check_size(str(path), codec, max_pixels)  # a damaged header can claim any size
        codec.options = {"max_pixels": str(max_pixels)}  # later frames can be larger
        yield container


def is_turned(frame: Any) -> bool:
    """Whether a PyAV frame is displayed with width and height swapped."""
    a, b, _, _ = _display_matrix(frame)
    return abs(b) > abs(a)


def upright(pixels: Tensor, frame: Any) -> Tensor:
    """Rotate and mirror the pixels (height, width, 3) of a frame according to its display matrix."""
    a, b, c, d = _display_matrix(frame)  # (x, y) -> (a x + c y, b x + d y)
    if abs(b) > abs(a):  # rotated by 90 degrees: swap the axes, then mirror
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
    # Remove the memory address in Pillow's messages, which differs between runs.
    text = re.sub(r" <_io\.[^>]*>", "", getattr(error, "strerror", None) or str(error))
    return " ".join(text.split()) or type(error).__name__
