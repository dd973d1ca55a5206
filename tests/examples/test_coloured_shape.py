"""The rule that reads shapes is right about shapes drawn to order, and says nothing of what is not clear."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageDraw

from examples.image_rl.coloured_shape import COLOURS, SHAPES, coloured_shape, overlap, read_shape
from mmrl.core.types import Message, Outcome, Part, Prompt


def drawn(shape, colour, box=(6, 5, 26, 25), side=32, ground=(240, 235, 245)):
    """Draw a shape eight times as large, and shrink it."""
    image = Image.new("RGB", (8 * side, 8 * side), ground)
    left, top, right, bottom = (8 * x for x in box)
    pen = ImageDraw.Draw(image)
    match shape:
        case "circle":
            pen.ellipse((left, top, right - 1, bottom - 1), fill=colour)
        case "rectangle":
            pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
        case "triangle":
            pen.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill=colour)
    small = image.resize((side, side), Image.Resampling.BOX)
    return (
        torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1)
    )


def asked(text):
    return Prompt("p", (Message("user", (Part(text),)),))


def value(image, text="a red circle"):
    return coloured_shape([asked(text)], [Outcome(image=image)])[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("box", [(6, 5, 26, 25), (0.5, 3.3, 9.7, 12), (20, 2, 32, 12)])
def test_every_shape_is_read_wherever_it_lies(shape, box):
    assert read_shape(drawn(shape, (0, 128, 128), box)) == ("teal", shape)


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_is_read(colour):
    assert read_shape(drawn("triangle", COLOURS[colour])) == (colour, "triangle")


def test_the_reward_is_a_half_for_colour_and_a_half_for_shape():
    red = (255, 0, 0)
    assert value(drawn("circle", red)) == 1.0
    assert value(drawn("rectangle", red)) == value(drawn("circle", (0, 0, 255))) == 0.5
    assert value(drawn("rectangle", (0, 0, 255))) == 0.0


def test_a_prompt_without_one_colour_and_one_shape_is_left_out():
    image = drawn("circle", (255, 0, 0))
    for text in ("a circle", "a red thing", "a red circle and a blue circle", ""):
        assert value(image, text) is None


def test_nothing_is_read_from_a_blank_image_noise_or_a_broken_shape():
    noise = torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    assert read_shape(torch.full((3, 16, 16), 200, dtype=torch.uint8)) == (None, None)
    assert read_shape(noise)[1] is None
    broken = drawn("circle", (255, 0, 0))
    broken[:, 6:24:2] = broken[:, :1, :1]
    assert read_shape(broken) == ("red", None)


def test_a_colour_between_those_of_the_data_set_is_none():
    # (255, 0, 255) is 182 away from brown, the nearest of all but those farther away.
    assert read_shape(drawn("circle", (255, 0, 255)))[0] is None
    assert read_shape(drawn("circle", (255, 0, 255)), colour_distance=400.0)[0] is not None


def test_overlap_of_a_square_with_the_shapes_inside_it_is_their_share_of_it():
    # A circle covers pi / 4 = 0.785 of its square, a triangle a half.
    cover = torch.zeros(40, 40, dtype=torch.float64)
    cover[4:36, 4:36] = 1.0
    assert overlap(cover, "rectangle") == 1.0
    assert overlap(cover, "circle") == pytest.approx(0.785, abs=0.01)
    assert overlap(cover, "triangle") == pytest.approx(0.5, abs=0.01)
    assert overlap(0.4 * cover, "circle") == 0.0  # blotches: no pixel is half covered


def test_one_pixel_is_a_rectangle():
    image = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    image[:, 3, 4] = 0
    assert read_shape(image) == ("black", "rectangle")


@pytest.mark.parametrize(
    "edges", [(0, 0.25, 1, 1, 1, 0.5, 0, 0), (0, 0, 0.75, 1, 0.25, 0, 0, 0), (0, 0.25, 1, 0.25)]
)
def test_the_box_of_a_shape_ends_inside_pixels_that_are_partly_covered(edges):
    cover = torch.tensor(edges, dtype=torch.float64)[:, None] * torch.tensor(edges, dtype=torch.float64)
    assert overlap(cover, "rectangle") == pytest.approx(1)
