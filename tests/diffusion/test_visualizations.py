"""Pictures in the report: grids of what models made, and trajectories with their turning points."""

from __future__ import annotations

import base64
import io
import re
from itertools import combinations

import pytest
import torch
from PIL import Image

from mmrl.advantages.shape import total
from mmrl.advantages.turning_points import turning_points as credit
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.diffusion.visualizations import data_url, displayed_image, image_grid, turning_points
from mmrl.training.score import score
from tests.support.svg import overlap, text_boxes

CHAIN = (total, credit)


def grey(shade, side=4):
    return torch.full((3, side, side), shade, dtype=torch.uint8)


def asked(text):
    return Prompt(text, (Message("user", (Part(text),)),))


def path(text, *rewards):
    """A row with one outcome per prefix, which records the reward."""
    outcomes = tuple(
        Outcome(image=grey(10 * i), end=i, recorded={"score": reward}) for i, reward in enumerate(rewards)
    )
    return Trajectory(asked(text), text, outcomes, None, len(rewards) - 1)


def measured(*rows):
    reward = Pieces(Stream()).make("reward", Piece("precomputed", {"key": "score"}))
    return Measured({}, {}, rows, score([reward], rows))


def images(page):
    found = re.findall(r"src='data:image/png;base64,([^']+)'", page)
    return [Image.open(io.BytesIO(base64.b64decode(source))) for source in found]


def test_embedded_keeps_small_images_exactly_and_shrinks_large_ones():
    small = torch.arange(48).view(3, 4, 4).to(torch.uint8)
    kept = Image.open(io.BytesIO(base64.b64decode(data_url(small, 96).split(",")[1])))
    assert (kept.format, kept.size, kept.getpixel((1, 2))) == ("PNG", (4, 4), (9, 25, 41))
    large = Image.open(io.BytesIO(base64.b64decode(data_url(grey(7, 200)[:, :100], 96).split(",")[1])))
    assert (large.format, large.size) == ("JPEG", (96, 48))


def test_of_a_video_the_middle_frame_is_shown():
    video = torch.stack([grey(i) for i in range(5)])
    assert displayed_image(Outcome(video=video))[0, 0, 0] == 2
    assert displayed_image(Outcome(text="none")) is None


def test_image_grid_shows_every_model_under_its_caption_with_its_rewards():
    one = measured(path("a <red> circle", 0.25), path("a <red> circle", 0.75), path("a cat", 0.0))
    page = image_grid({"start": one, "<b>": measured(path("a cat", 1.0))})
    assert page.count("<figure>") == 2 and len(images(page)) == 4
    assert "a &lt;red&gt; circle" in page and "<red>" not in page and "&lt;b&gt;  precomputed 1.00" in page
    assert "start  precomputed 0.50" in page  # the mean of 0.25 and 0.75


def test_image_grid_takes_prompts_at_equal_distances_and_few_images_of_each():
    rows = [path(f"prompt {i}.", 0.0) for i in range(10) for _ in range(3)]
    page = image_grid({"m": measured(*rows)}, num=5, per_prompt=2)
    assert re.findall(r"prompt (\d)\.", page) == ["0", "2", "4", "6", "8"]
    assert len(images(page)) == 10


def test_image_grid_of_nothing_or_of_texts_is_empty():
    assert "<figure>" not in image_grid({"m": Measured({}, {}, (), RewardTable.empty())})


def test_turning_points_marks_steps_whose_credit_is_not_what_they_added():
    # Increments -.1, .05, .15, -.02, .12; the second step turned the trend, and earns .7 - .4 = .3.
    page = turning_points(
        {"tp_grpo": measured(path("a <cat>", 0.5, 0.4, 0.45, 0.6, 0.58, 0.7))}, advantage=CHAIN
    )
    assert re.findall(r">((?:→ )?[-+]\d\.\d\d)</text>", page) == [
        "-0.10", "+0.05", "→ +0.30", "+0.15", "-0.02", "+0.12",
    ]  # fmt: skip
    assert page.count("stroke-dasharray") == 1
    assert re.findall(r"<small>(\d\.\d\d)</small>", page) == ["0.50", "0.40", "0.45", "0.60", "0.58", "0.70"]
    assert [image.getpixel((0, 0))[0] for image in images(page)] == [0, 10, 20, 30, 40, 50]
    assert "a &lt;cat&gt;" in page and "<cat>" not in page


def test_turning_points_draws_bars_as_high_as_what_was_added():
    page = turning_points({"m": measured(path("p", 0.0, 0.2, -0.2))}, advantage=CHAIN)
    # Steps of +.2 and -.4 on one scale, upwards and downwards from the line at 65.
    bars = [
        (float(y), float(h)) for y, h in re.findall(r"y='([\d.]+)' width='[\d.]+' height='([\d.]+)'", page)
    ]
    assert bars[1][1] == pytest.approx(2 * bars[0][1], abs=0.02)
    assert bars[0][0] == pytest.approx(65 - bars[0][1], abs=0.02) and bars[1][0] == 65


def test_labels_of_turning_points_lie_inside_and_do_not_touch():
    # The first step turns the trend, so that its credit stands at the edge; all steps are small.
    page = turning_points({"m": measured(path("p", 0.51, 0.5, 0.498, 0.495, 0.6))}, advantage=CHAIN)
    small = turning_points({"m": measured(path("p", 0.51, 0.508, 0.511))}, advantage=CHAIN)
    assert re.findall(r">([-+][\d.]+)</text>", small) == ["-0.0020", "+0.0030"], "not all +0.00"
    for drawn in (page, small):
        _, _, width, height = map(float, re.search(r"viewBox='([^']*)'", drawn)[1].split())
        boxes = text_boxes(drawn)
        assert len(boxes) >= 2 and not [pair for pair in combinations(boxes, 2) if overlap(*pair)]
        assert all(a >= 0 and b >= 0 and c <= width and d <= height for a, b, c, d in boxes)


def test_trajectories_with_most_turning_points_come_first():
    # Increments -.1, .05, -.02, .17, .1: the second and the fourth turn the trend.
    turned, level = path("turned", 0.5, 0.4, 0.45, 0.43, 0.6, 0.7), path("level", *[0.5] * 6)
    page = turning_points({"m": measured(level, turned)}, advantage=CHAIN, num=1)
    assert "turned" in page and "level" not in page and page.count("stroke-dasharray") == 2
    assert turning_points({"m": measured(level, turned)}, advantage=CHAIN).count("<figure>") == 2


def test_without_probes_there_is_nothing_to_show():
    assert turning_points({"m": measured(path("p", 0.5))}, advantage=CHAIN) == ""
    assert turning_points({"m": Measured({}, {}, (), RewardTable.empty())}, advantage=CHAIN) == ""


def test_equal_rewards_are_drawn_without_a_division_by_zero():
    page = turning_points({"m": measured(path("p", 0.5, 0.5, 0.5))}, advantage=CHAIN)
    assert "nan" not in page and page.count("+0.00") == 2
