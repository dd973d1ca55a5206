"""RefCOCO's published files become prompts with boxes, one for every expression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.types import Outcome
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.vision.datasets.boxes import boxes
from mmrl.vision.rewards.boxes import box_iou

SENTENCES = [
    {"raw": "A dog!", "sent": "a dog", "sent_id": 3, "tokens": ["a", "dog"]},
    {"raw": "left", "sent": "left one", "sent_id": 4, "tokens": ["left", "one"]},
]
REF = {
    "ref_id": 9, "ann_id": 5, "image_id": 1, "category_id": 2, "split": "testA", "sent_ids": [3, 4],
    "file_name": "COCO_1_5.jpg", "sentences": SENTENCES,
}  # fmt: skip
INSTANCES = {
    "images": [{"id": 1, "file_name": "COCO_1.jpg"}],
    "annotations": [{"id": 5, "image_id": 1, "bbox": [1, 2, 10, 20]}],
}
HUB = {"image": "COCO_1.jpg", "answer": ["a cat", "b"], "bbox": [1, 2, 30, 40], "question_id": "7"}
INSTANCE = {"instances": "instances.json"}
QWEN = {"image": "COCO_1.jpg", "sent": "a cat", "bbox": [1, 2, 30, 40], "width": 64, "height": 48}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48)).save("COCO_1.jpg")
    Path("instances.json").write_text(json.dumps(INSTANCES))
    other = {**REF, "split": "val", "sentences": [{"sent": "other", "sent_id": 5}]}
    write_rows(Path("refs.json"), [REF, other])
    write_rows(Path("hub.jsonl"), [HUB])
    write_rows(Path("qwen.jsonl"), [QWEN])


def read(path, **options):
    return boxes(path=path, format="refcoco", root=".", **options)


def test_refs_join_the_boxes_of_the_instances(home, caplog):
    first, second = read("refs.json", instances="instances.json", split="testA")
    assert [first.uid, second.uid] == ["3", "4"] and 'Where is "left one" in' in second.text
    assert first.target.boxes == ((1.0, 2.0, 11.0, 22.0),)  # left, top, width, height
    assert first.media[0].load().pixels.shape == (1, 3, 48, 64)
    assert len(read("refs.json", instances="instances.json")) == 3
    assert "nothing reads these columns" in caplog.text and "sent_ids" in caplog.text
    assert "ann_id" not in caplog.text  # read to find the box


def test_the_other_layouts_have_their_own_corners(home):
    one, two = read("hub.jsonl")
    assert (one.uid, two.uid, one.target.boxes) == ("7#0", "7#1", ((1.0, 2.0, 31.0, 42.0),))
    (only,) = read("qwen.jsonl", coordinates="shares")
    assert only.target.boxes == ((1.0, 2.0, 30.0, 40.0),)
    (reward,) = box_iou([only], [Outcome(text="[0.015625, 0.0416667, 0.46875, 0.8333333]")])
    assert reward == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "row", "options", "message"),
    [
        ("refs.json", None, {}, "set `instances`, the file of its box"),
        ("rows.jsonl", {**REF, "ann_id": 6}, INSTANCE, "have no annotation 6"),
        ("rows.jsonl", {**REF, "sentences": [{}]}, INSTANCE, "wanted a text as `sent`"),
        ("rows.jsonl", {**HUB, "bbox": [1, 2, 3]}, {}, r"rows.jsonl:1: wanted a list of 4 as `bbox`"),
        ("rows.jsonl", {**HUB, "bbox": [1, 2, 0, 3]}, {}, "left < right and top < bottom"),
        ("rows.jsonl", {**HUB, "image": "../x.jpg"}, {}, "leaves its root|there is no file"),
        ("rows.jsonl", {"image": "COCO_1.jpg", "bbox": [0, 0, 1, 1]}, {}, "wanted `sentences`, `answer`"),
        ("refs(unc).p", None, {}, "is a pickle, which can run code and is never read"),
        ("refs.json", None, {"instances": "refs.json"}, "must hold a JSON dict"),
        ("refs.json", None, {**INSTANCE, "split": "testB"}, "holds no row that can be used"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(home, path, row, options, message):
    if row:
        write_rows(Path(path), [row])
    with pytest.raises(RowError, match=message):
        read(path, **options)


def test_a_bad_row_can_be_dropped(home):
    write_rows(Path("rows.jsonl"), [HUB, {**HUB, "question_id": "8", "answer": None}])
    assert len(read("rows.jsonl", bad_rows="drop")) == 2


def test_options_of_the_other_format_are_refused(home):
    with pytest.raises(ValueError, match="are for `format: refcoco`"):
        boxes(path="qwen.jsonl", split="val")
    with pytest.raises(ValueError, match="knows the layout of its boxes"):
        read("hub.jsonl", form="size")
