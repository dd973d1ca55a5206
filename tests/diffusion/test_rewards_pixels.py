"""Rewards and labels of images that need no model."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.rewards.pixel_statistics import clipped_pixels, jpeg_compressibility, pairwise_diversity

PROMPT, OTHER = Prompt("p", ()), Prompt("q", ())


def flat(value: int, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.full((3, *size), value, dtype=torch.uint8)


def noise(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)


# ---- jpeg_compressibility


def test_jpeg_size_is_in_kilobytes_at_quality_95(generator):
    picture = noise(generator)
    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="JPEG", quality=95)
    kilobytes = len(buffer.getvalue()) / 1000
    assert jpeg_compressibility([PROMPT], [Outcome(image=picture)]) == [pytest.approx(kilobytes)]
    compressible = jpeg_compressibility([PROMPT], [Outcome(image=picture)], form="compressible")
    assert compressible == [pytest.approx(-kilobytes / 500)]


def test_noise_is_large_and_a_flat_image_small(generator):
    outcomes = [Outcome(image=noise(generator)), Outcome(image=flat(90, (64, 64)))]
    large, small = jpeg_compressibility([PROMPT] * 2, outcomes)
    assert large > 5 * small
    worst, best = jpeg_compressibility([PROMPT] * 2, outcomes, form="compressible")
    assert worst < best < 0


def test_images_that_are_none_are_errors():
    for reward in (jpeg_compressibility, clipped_pixels, pairwise_diversity):
        with pytest.raises(ValueError, match="an outcome of prompt 'p' has neither an image nor a video"):
            reward([PROMPT], [Outcome(text="a dog")])


# ---- saturation


def test_saturation_is_the_share_of_values_at_both_ends():
    half = flat(128)
    half[:, :8] = 255
    half[0, 8:16] = 0
    # A quarter of all rows in three channels, and a quarter in one: 1/4 + 1/12
    given = clipped_pixels(
        [PROMPT] * 4,
        [
            Outcome(image=flat(0)),
            Outcome(image=flat(254)),
            Outcome(image=half),
            Outcome(video=torch.stack([half, flat(1)])),
        ],
    )
    assert given == pytest.approx([1.0, 0.0, 1 / 3, 1 / 6])


# ---- diversity


def test_diversity_is_the_mean_distance_to_the_others_of_a_prompt():
    # In [0, 1] the images of p stand at 0, .2 and 1: mean distances .6, .5 and .9. The one of q is alone.
    pictures = [flat(0), flat(51), flat(7), flat(255)]
    given = pairwise_diversity([PROMPT, PROMPT, OTHER, PROMPT], [Outcome(image=p) for p in pictures])
    assert given == [pytest.approx(0.6), pytest.approx(0.5), None, pytest.approx(0.9)]
    assert pairwise_diversity([PROMPT] * 2, [Outcome(image=flat(9))] * 2) == [0.0, 0.0]


def test_diversity_compares_images_of_one_place_whatever_their_size():
    outcomes = [
        Outcome(image=flat(0), end=1),
        Outcome(image=flat(51), end=2),
        Outcome(image=flat(255, (64, 40)), end=1),
        Outcome(image=flat(102, (16, 16)), end=2),
    ]
    assert pairwise_diversity([PROMPT] * 4, outcomes) == pytest.approx([1.0, 0.2, 1.0, 0.2])


def test_diversity_sees_where_images_differ():
    left, right = flat(0), flat(0)
    left[:, :, :16], right[:, :, 16:] = 255, 255
    # Every pixel differs by 1, though the means of both images are equal.
    assert pairwise_diversity([PROMPT] * 2, [Outcome(image=left), Outcome(image=right)]) == pytest.approx(
        [1.0, 1.0]
    )
