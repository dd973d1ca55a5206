"""One image by every way is the same pixels: files, bytes, objects, rows, tools, chats and frames."""

from __future__ import annotations

import base64
import io
import json

import numpy
import pytest
import torch
from PIL import Image

from mmrl.core.types import Outcome
from mmrl.data.fields import RowError
from mmrl.data.media import MediaError, held_or_named, to_image, upright_size
from mmrl.data.media_reader import MediaReader, film
from mmrl.data.object_rows import put_rows
from mmrl.diffusion.image_io import load_image
from mmrl.vision.datasets.boxes import boxes
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.rewards.boxes import box_iou
from mmrl.vision.tools.replies import Limits, as_parts

PIXELS = numpy.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=numpy.uint8)
GREY16 = numpy.random.default_rng(1).integers(0, 65536, (6, 9), dtype=numpy.uint16)


def turned(orientation):
    image = Image.fromarray(PIXELS)
    exif = image.getexif()
    exif[0x0112] = orientation
    return image, {"exif": exif}


def clear(mode):
    image = Image.fromarray(numpy.dstack([PIXELS, PIXELS[..., 0]]))
    return image.convert(mode)


# An image, how it is saved, and the form of the file.
PLAIN = ("PNG", "JPEG", "GIF", "WEBP", "BMP")  # recognised in plain base64
MODES = {
    "RGB": (Image.fromarray(PIXELS), {}, "PNG"),
    "L": (Image.fromarray(PIXELS[..., 0]), {}, "PNG"),
    "1": (Image.fromarray(PIXELS[..., 0]).convert("1"), {}, "PNG"),
    "P": (Image.fromarray(PIXELS).convert("P"), {}, "PNG"),
    "RGBA": (clear("RGBA"), {}, "PNG"),
    "LA": (clear("LA"), {}, "PNG"),
    "16 bits": (Image.fromarray(GREY16), {}, "PNG"),
    "CMYK": (Image.fromarray(PIXELS).convert("CMYK"), {}, "JPEG"),
    **{f"turned {n}": (*turned(n), "JPEG") for n in (2, 3, 6, 8)},
}


Q = {"type": "text", "text": "q"}


def shown(prompt_rows, root=""):
    (prompt,) = conversations(path=prompt_rows, root=root)
    return prompt.media[0].load().pixels


def by_every_way(folder, image, options, form):
    """Give the pixels (1, 3, H, W) of one file by every way in which it can come."""
    path = folder / f"image.{form.lower()}"
    image.save(path, **options)
    data, rows = path.read_bytes(), folder / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "image": path.name}))

    def opened():
        return Image.open(io.BytesIO(data))

    reader, limits = MediaReader(), Limits(100, 10**6)
    yield "file of a row", shown(str(rows))
    for name, value in {"bytes": data, "mapping": {"bytes": data, "path": None}, "object": opened()}.items():
        yield f"{name} in a row", shown(put_rows("rows", [{"prompt": "q", "image": value}], "train"))
    held, address = base64.b64encode(data).decode(), f"file://{path}"
    texts = {"data address": f"data:image/{form.lower()};base64,{held}", "file address": address}
    for name, value in {**texts, **({"base64": held} if form in PLAIN else {})}.items():
        yield (
            f"{name} in a row",
            shown(put_rows("rows", [{"prompt": "q", "image": value}], "train"), str(folder)),
        )
    part = {"type": "image_url", "image_url": {"url": texts["data address"]}}
    yield (
        "OpenAI's part",
        shown(put_rows("rows", [{"prompt": [{"role": "user", "content": [part, Q]}]}], "train")),
    )
    for name, value in {"path": str(path), "bytes": data, "object": opened(), **texts}.items():
        yield f"{name} in a chat", reader("image", value, "it").load().pixels
    yield "reply of a tool", as_parts(opened(), "t", limits)[0].media.load().pixels
    yield (
        "block of a tool",
        as_parts({"type": "image", "image": opened()}, "t", limits)[0].media.load().pixels,
    )
    yield "frame", film([opened()]).pixels
    yield "target of a flow model", load_image(path)[None]


@pytest.mark.parametrize("form", PLAIN)
def test_a_small_image_in_plain_base64_is_no_path(tmp_path, form):
    data = io.BytesIO()
    Image.new("RGB", (2, 2), (250, 10, 20)).save(data, form, lossless=True)
    held = base64.b64encode(data.getvalue()).decode()
    wanted = MediaReader()("image", data.getvalue(), "it").load().pixels
    wrapped = "\n".join(held[at : at + 20] for at in range(0, len(held), 20))
    for text in (held, wrapped, held.rstrip("=")):
        assert torch.equal(MediaReader()("image", text, "it").load().pixels, wanted)


@pytest.mark.parametrize(
    "path",
    [
        "cats/dogs",
        "iVBORw0KGgo/a.png",
        "/9j/images/cat",
        "R0lGOD/dogs",
        "UklGRtcats/dogs",
        "Qk0abc/dogs1234",
        "a=== ",
    ],
)
def test_a_path_like_base64_stays_a_path(path):
    assert held_or_named(path) == path


def test_damaged_base64_is_said_to_be_base64(tmp_path):
    data = io.BytesIO()
    Image.effect_noise((32, 32), 50).save(data, "PNG")
    held = base64.b64encode(data.getvalue()).decode()
    with pytest.raises(MediaError, match=r"cannot decode 'iVBORw0KGgo.*wanted base64"):
        held_or_named(held[:300] + "-" + held[301:])


@pytest.mark.parametrize("mode", MODES)
def test_an_image_is_the_same_pixels_by_every_way(tmp_path, mode):
    ways = dict(by_every_way(tmp_path, *MODES[mode]))
    wanted = ways.pop("file of a row")
    for way, pixels in ways.items():
        assert torch.equal(pixels, wanted), way


@pytest.mark.parametrize(
    "value", ["https://x.org/a.png", "file:///etc/hostname", "data:image/png;base64,AAAA"]
)
def test_addresses_are_no_way_around_the_root(tmp_path, value):
    with pytest.raises(RowError) as error:
        shown(put_rows("rows", [{"prompt": "q", "image": value}], "train"), str(tmp_path))
    assert len(str(error.value)) < 600


def test_a_turned_photo_is_upright(tmp_path):
    ways = dict(by_every_way(tmp_path, *MODES["turned 6"]))
    assert all(pixels.shape == (1, 3, 9, 6) for pixels in ways.values())
    assert upright_size(tmp_path / "image.jpeg", "it") == (6, 9)


def test_white_of_16_bits_is_white_and_what_is_clear_becomes_white():
    reader = MediaReader()
    white = Image.fromarray(numpy.full((2, 2), 65535, numpy.uint16))
    assert reader("image", white, "it").load().pixels.unique().tolist() == [255]
    nothing = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert reader("image", nothing, "it").load().pixels.unique().tolist() == [255]


@pytest.mark.parametrize(
    "value",
    [
        PIXELS,
        PIXELS.astype(numpy.float32) / 255,
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1).double() / 255,
    ],
    ids=["array", "floats", "tensor", "channels first", "double"],
)
def test_arrays_and_tensors_are_the_image_that_they_hold(value):
    wanted = torch.from_numpy(PIXELS).permute(2, 0, 1)[None]
    assert torch.equal(MediaReader()("image", value, "it").load().pixels, wanted)
    assert torch.equal(as_parts(value, "t", Limits(100, 10**6))[0].media.load().pixels, wanted)
    assert torch.equal(film([value]).pixels, wanted)
    row = put_rows("rows", [{"prompt": "q", "image": value}], "train")
    assert torch.equal(shown(row), wanted)


@pytest.mark.parametrize(
    "value",
    [numpy.zeros((4, 4, 3)) + 2, numpy.full((4, 4, 3), numpy.nan), numpy.zeros((4, 4, 7), numpy.uint8)],
    ids=["above 1", "nan", "channels"],
)
def test_an_array_that_is_no_image_is_named(value):
    with pytest.raises(MediaError, match=r"'it' is an array \(4, 4, \d\) of \S+; wanted"):
        to_image(value, "it")


@pytest.mark.parametrize(
    ("coordinates", "answer"),
    [("pixels", "[0, 0, 50, 100]"), ("thousandths", "[0, 0, 500, 333]"), ("shares", "[0, 0, 0.5, 0.333]")],
)
@pytest.mark.parametrize("inside", [False, True], ids=["file", "object"])
def test_boxes_of_a_turned_photo_are_scaled_as_it_is_shown(tmp_path, coordinates, answer, inside):
    image = Image.new("RGB", (300, 100))  # shown 100 wide and 300 high
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    row = {"query": "dog", "bbox": [0, 0, 50, 100], "image": "a.jpg"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    path = str(tmp_path / "rows.jsonl")
    if inside:
        path = put_rows("rows", [{**row, "image": Image.open(tmp_path / "a.jpg")}], "train")
    (prompt,) = boxes(path=path, coordinates=coordinates, demo="<answer>{answer}</answer>")
    outcomes = [Outcome(text=f"<answer>{answer}</answer>"), *prompt.answers]
    assert box_iou([prompt] * 2, outcomes) == [pytest.approx(1, abs=2e-3), pytest.approx(1, abs=2e-3)]
