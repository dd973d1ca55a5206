"""The check `boxes_in_images`: target boxes in pixels of the image that is asked about."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mmrl.vision.benchmarks.boxes import Boxes
from mmrl.vision.checks.boxes_in_images import boxes_in_images


def prompt(uid, box):
    image = SimpleNamespace(load=lambda: SimpleNamespace(pixels=torch.zeros(1, 3, 50, 100)))
    return SimpleNamespace(uid=uid, target=Boxes((box,)), media=(image,))


def test_a_box_outside_of_its_image_is_named_and_one_that_was_rounded_is_not():
    # 100 x 50, of which 2 % are 2 and 1 pixels, and one more for rounding: 103 x 52
    inside, outside = prompt("in", (0, 0, 103, 52)), prompt("out", (0, 0, 104, 52))
    assert not [*boxes_in_images(SimpleNamespace(prompts=[inside]))]
    (found,) = boxes_in_images(SimpleNamespace(prompts=[inside, outside]))
    assert (
        "the box [0, 0, 104, 52] of prompt 'out' does not lie in its image of 100 x 50 (1 of 2 prompts)"
        in str(found)
    )
    assert not found.grave
