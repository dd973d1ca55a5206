"""Damaged images and videos by number: valid small files, broken in the ways that files break."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import av
import numpy
from PIL import Image, features

CODECS = {
    "mp4": "libx264", "mov": "mpeg4", "mkv": "libx264", "webm": "libvpx", "avi": "mpeg4", "flv": "flv",
    "ts": "mpeg2video", "gif": "gif",
}  # fmt: skip
IMAGES = ("png", "deep.png", "text.png", "p.png", "jpg", "exif.jpg", "gif", "bmp", "tiff", "lzw.tiff", "webp",
          "ppm", "avif", "eps", "dds", "tga", "jp2", "ico")  # fmt: skip
FORMATS = {"jpg": "JPEG", "jp2": "JPEG2000"}


@cache
def valid(name: str) -> bytes:
    """Make a small file: an image of 24 by 16 pixels, or a video of 8 frames."""
    ending = name.rpartition(".")[2]
    buffer = io.BytesIO()
    noise = numpy.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=numpy.uint8)
    if ending in CODECS and ending != "gif":
        _write_video(buffer, ending, noise)
        return buffer.getvalue()
    image, options = Image.fromarray(noise), {}
    if name == "deep.png":
        image = Image.fromarray(noise[..., 0].astype(numpy.uint16) * 257)
    if name in ("p.png", "gif"):
        image = image.quantize(16)
    if name == "gif":
        options = {"save_all": True, "append_images": [image.rotate(180)] * 7, "duration": 250}
    if name == "lzw.tiff":
        options = {"compression": "tiff_lzw"}
    if name == "exif.jpg":
        exif = Image.Exif()
        exif[0x0112], exif[0x010E] = 6, "a description"
        options = {"exif": exif, "comment": b"\xff\xfe no UTF-8"}
    if name == "text.png":
        options = {"pnginfo": _notes()}
    image.save(buffer, FORMATS.get(ending, ending), **options)
    return buffer.getvalue()


def _notes():
    from PIL.PngImagePlugin import PngInfo

    notes = PngInfo()
    notes.add_itxt("word", "a note", zip=True)
    notes.add_text("other", "words", zip=True)
    return notes


def _write_video(buffer: io.BytesIO, ending: str, noise: numpy.ndarray) -> None:
    form = {"mkv": "matroska", "ts": "mpegts"}.get(ending, ending)
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(CODECS[ending], rate=25)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.time_base = Fraction(1, 25)
        for i in range(8):
            frame = av.VideoFrame.from_ndarray(numpy.roll(noise, i, 1).repeat(2, 0).repeat(2, 1))
            frame.pts, frame.time_base = i, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


# ---- damage


def cut(data: bytes, draw: random.Random) -> bytes:
    """End too early, or before the first byte."""
    return data[: draw.choice([0, 1, 8, draw.randrange(len(data)), len(data) - 1])]


def flip(data: bytes, draw: random.Random) -> bytes:
    """Change some bytes anywhere."""
    damaged = bytearray(data)
    for _ in range(draw.choice([1, 3, 20])):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged)


def flip_head(data: bytes, draw: random.Random) -> bytes:
    """Change some of the first bytes, where sizes and types stand."""
    damaged = bytearray(data)
    for _ in range(draw.choice([1, 2, 6])):
        damaged[draw.randrange(min(96, len(damaged)))] = draw.choice(
            [0, 1, 127, 128, 255, draw.randrange(256)]
        )
    return bytes(damaged)


def wipe(data: bytes, draw: random.Random) -> bytes:
    """Fill a stretch with one byte, as lost sectors are."""
    start = draw.randrange(len(data))
    length = min(draw.randrange(1, 200), len(data) - start)
    return data[:start] + bytes([draw.choice([0, 255])]) * length + data[start + length :]


def splice(data: bytes, draw: random.Random) -> bytes:
    """Leave a stretch out, or write it twice."""
    start = draw.randrange(len(data))
    end = start + draw.randrange(1, 64)
    return data[:start] + data[end:] if draw.random() < 0.5 else data[:end] + data[start:]


def other_words(data: bytes, draw: random.Random) -> bytes:
    """Put bytes that are no UTF-8 in the place of letters, with the sums of PNG mended."""
    damaged = bytearray(data)
    letters = [i for i in range(8, len(data)) if 97 <= data[i] <= 122]
    for at in draw.sample(letters, min(len(letters), 12)):
        damaged[at] = draw.randrange(128, 256)
    return with_sums(bytes(damaged))


def huge(data: bytes, draw: random.Random) -> bytes:
    """Claim a size of which only a bomb would be."""
    side = draw.choice([60_000, 1 << 30, 0x7FFFFFFF, 0xFFFFFFFF])
    if data.startswith(b"\x89PNG"):
        return with_sums(data[:16] + struct.pack(">II", side, side) + data[24:])
    if data.startswith(b"BM"):
        return data[:18] + struct.pack("<II", side & 0x7FFFFFFF, side & 0x7FFFFFFF) + data[26:]
    if data.startswith(b"GIF8"):
        return data[:6] + b"\xff\xff\xff\xff" + data[10:]
    if data.startswith(b"P6"):
        return f"P6 {side} {side} 255\n".encode() + data[15:]
    at = data.find(struct.pack(">HH", 16, 24))  # a JPEG, a sample entry of an MP4
    packed = struct.pack(">HH", 60_000, 60_000)
    return data[:at] + packed + data[at + 4 :] if at > 0 else flip_head(data, draw)


def with_sums(data: bytes) -> bytes:
    """Mend the check sums of a PNG, so that damage gets past them."""
    if not data.startswith(b"\x89PNG"):
        return data
    mended, at = data[:8], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + length]
        mended += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return mended + data[at:]


WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    cut, flip, flip_head, wipe, splice, other_words, huge, lambda data, draw: with_sums(flip(data, draw)),
)  # fmt: skip


def damaged(
    count: int, seed: int, names: tuple[str, ...] = (*IMAGES, *CODECS)
) -> Iterator[tuple[str, bytes]]:
    """Give `count` damaged files with their names; one in ten has the ending of another kind."""
    names = tuple(name for name in names if name != "avif" or features.check("avif"))
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        name = names[number % len(names)]
        data = WAYS[number // len(names) % len(WAYS)](valid(name), draw)
        ending = draw.choice(names) if draw.random() < 0.1 else name
        yield f"{number}.{ending.rpartition('.')[2]}", data
