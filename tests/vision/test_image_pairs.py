"""Pairs of images that differ in one thing: reading them from rows."""

from __future__ import annotations

import pytest
from PIL import Image

from mmrl.data.dataset_io import RowError, write_rows
from mmrl.vision.datasets.image_pairs import image_pairs


def test_pairs_are_read_in_order(tmp_path):
    for name, value in (("a.png", 10), ("b.png", 20)):
        Image.new("RGB", (4, 3), (value, 0, 0)).save(tmp_path / name)
    path = tmp_path / "pairs.jsonl"
    write_rows(path, [{"original": "a.png", "changed": "b.png", "what": "red"}])
    (prompt,) = image_pairs(path=str(path))
    assert [media.load().pixels[0, 0, 0, 0].item() for media in prompt.media] == [10, 20]
    assert (prompt.uid, prompt.text, prompt.columns) == ("pairs#0", "What is different?", {"what": "red"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"original": "a.png"}, "wanted one image as `changed`, got None"),
        (
            {"original": "a.png", "changed": ["a.png", "a.png"]},
            "wanted one image as `changed`, got \\['a.png', 'a.png'",
        ),
        ({"original": "a.png", "changed": 3}, "of the image as `changed`"),
        ({"original": "a.png", "changed": "../a.png"}, "a.png"),
    ],
)
def test_bad_rows_are_named(row, message, tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    write_rows(tmp_path / "pairs.jsonl", [row])
    with pytest.raises(RowError, match=message):
        image_pairs(path=str(tmp_path / "pairs.jsonl"))
