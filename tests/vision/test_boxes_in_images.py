"""Target boxes that stand out of their image are found before a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from mmrl.core.types import Message, Part, Prompt
from mmrl.data.media_root import MediaRoot
from mmrl.vision.benchmarks.boxes import Boxes
from mmrl.vision.checks.boxes_in_images import boxes_in_images


@pytest.mark.parametrize(
    ("box", "found"),
    [
        ((0, 0, 100, 50), False),  # the whole image of 100 x 50
        ((-2, 0, 102, 52), False),  # annotators round: 2 % of the side and a pixel
        ((0, 0, 104, 50), True),
        ((0, 0, 90, 53), True),
        ((-4, 0, 90, 50), True),
        ((200, 100, 400, 200), True),  # pixels of an image of another size
    ],
)
def test_a_box_beyond_its_image_is_found(box, found, tmp_path):
    Image.new("RGB", (100, 50)).save(tmp_path / "a.png")
    message = Message("user", (Part(media=MediaRoot(tmp_path).image("a.png")), Part("Where?")))
    prompts = [Prompt("p", (message,), Boxes((box,)))]
    findings = list(boxes_in_images(cast(Any, SimpleNamespace(prompts=prompts))))
    assert [finding.grave for finding in findings] == [True] * found
    assert all("1 of 1 prompts" in finding.what and "100 x 50" in finding.what for finding in findings)
