"""The tools that show parts of images."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from mmrl.core.types import Frames, Media
from mmrl.vision.tools.images import crop, pixel_box, zoom
from mmrl.vision.tools.replies import shrunk


def gradient():
    image = Image.new("RGB", (40, 20))
    image.putdata([(x, y, 0) for y in range(20) for x in range(40)])
    return image


def test_a_box_is_pixels_or_shares():
    assert pixel_box([10, 5, 30, 15], 40, 20) == (10, 5, 30, 15)
    assert pixel_box([0.25, 0.25, 0.75, 0.75], 40, 20) == (10, 5, 30, 15)
    assert pixel_box([0, 0, 1, 1], 40, 20) == (0, 0, 40, 20)
    assert pixel_box([0.5, 0.5, 0.501, 0.501], 40, 20) == (20, 10, 21, 11)  # at least a pixel


@pytest.mark.parametrize(
    "box",
    [
        [0, 0, 41, 20], [-1, 0, 5, 5], [5, 5, 5, 9], [9, 5, 5, 9], [0, 0, 9], "0123", None, [0, 0, True, 1],
        [0, 0, float("nan"), 5], [0, 0, float("inf"), 5], [0, 0, 10**400, 5], [0, 0, "5", 5], {},
    ],
)  # fmt: skip
def test_a_box_that_is_none_is_refused(box):
    with pytest.raises(ValueError, match="box"):
        crop(gradient(), box)


def test_crop_shows_the_pixels_of_the_box():
    shown = crop(gradient(), [10, 5, 30, 15])
    assert shown.size == (20, 10)
    assert shown.getpixel((0, 0)) == (10, 5, 0) and shown.getpixel((19, 9)) == (29, 14, 0)


def test_zoom_enlarges_the_box():
    shown = zoom(gradient(), [10, 5, 30, 15], 3)
    assert shown.size == (60, 30)
    assert shown.getpixel((1, 1)) == (10, 5, 0)


@pytest.mark.parametrize("factor", [0.5, -1, "2", float("nan"), 10**9, 1e8])
def test_a_factor_that_makes_too_many_pixels_or_fewer_is_refused(factor):
    with pytest.raises(ValueError, match=r"factor|the limit is 1048576"):
        zoom(gradient(), [0, 0, 1, 1], factor)


def test_an_image_that_is_kept_is_small_and_looks_alike():
    pixels = torch.zeros(1, 3, 300, 1200, dtype=torch.uint8)
    pixels[..., 600:] = 200
    whole = Media("image", "a part", lambda: Frames(pixels, torch.zeros(1)))
    small = shrunk(whole).load().pixels
    assert small.shape == (1, 3, 60, 240)
    assert small[..., :100].max() == 0 and small[..., 140:].min() == 200
    assert torch.equal(shrunk(whole, 1200).load().pixels, pixels)
