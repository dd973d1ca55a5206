"""Rows of boxes and of stepwise retrieval, as they are and as they are published."""

from __future__ import annotations

import pytest
from PIL import Image

from mmrl.core.types import Outcome, Prompt
from mmrl.data.dataset_io import RowError, write_rows
from mmrl.papers.r1_router import stepwise
from mmrl.rewards.text import tag_format
from mmrl.vision.datasets.boxes import boxes
from mmrl.vision.rewards.boxes import box_iou, detection_map

ROW = {"id": "a", "image": "a.png", "query": "the red one", "bbox": [20, 10, 100, 50]}


@pytest.fixture
def home(tmp_path):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    Image.new("RGB", (100, 100)).save(tmp_path / "b.png")
    return tmp_path


def read(home, *rows, reader=boxes, **options):
    write_rows(home / "rows.jsonl", rows)
    return reader(path=str(home / "rows.jsonl"), **options)


def one(home, row=ROW, **options):
    (prompt,) = read(home, row, **options)
    return prompt


def said(prompt):
    return [part.media.name if part.media else part.text for part in prompt.messages[-1].parts]


def test_a_row_shows_its_image_and_asks_for_a_box_in_pixels(home):
    prompt = one(home)
    image, words = said(prompt)
    assert image == "a.png" and '"the red one"' in words and "in pixels" in words
    assert prompt.target.boxes == ((20, 10, 100, 50),) and prompt.uid == "a"
    assert "image" not in prompt.columns and prompt.answers == ()


@pytest.mark.parametrize(
    ("coordinates", "demo"),
    [
        ("pixels", "[20, 10, 100, 50]"),
        ("thousandths", "[100, 100, 500, 500]"),
        ("shares", "[0.1, 0.1, 0.5, 0.5]"),
        # 200 x 100 becomes 196 x 112: both sides go to the nearest multiple of 28.
        ("resized", "[20, 11, 98, 56]"),
    ],
)
def test_a_demonstration_is_right_in_all_coordinates(home, coordinates, demo):
    prompt = one(home, coordinates=coordinates, demo="<answer>{answer}</answer>")
    assert prompt.answers[0].text == f"<answer>{demo}</answer>"
    assert box_iou([prompt], prompt.answers)[0] > 0.95
    exact = coordinates != "resized"  # there whole pixels are rounded
    assert (box_iou([prompt], prompt.answers)[0] == pytest.approx(1)) == exact


def test_boxes_as_corner_and_size(home):
    assert one(home, form="size").target.boxes == ((20, 10, 120, 60),)


def test_rows_in_shares_or_thousandths_are_pixels(home):
    shares = {**ROW, "bbox": [0.1, 0.1, 0.5, 0.5]}
    assert one(home, shares, given="shares").target.boxes == ((20, 10, 100, 50),)
    row = {**ROW, "bbox": [100, 100, 400, 400]}
    prompt = one(home, row, given="thousandths", form="size", coordinates="thousandths", demo="{answer}")
    assert prompt.target.boxes == ((20, 10, 100, 50),) and prompt.answers[0].text == "[100, 100, 500, 500]"
    with pytest.raises(RowError, match="inside of one pixel; for shares set `given: shares`"):
        read(home, shares)


def test_objects_have_labels_and_may_be_none(home):
    found = [{"bbox_2d": [0, 0, 10, 10], "label": "Cat"}, {"bbox": [5, 5, 9, 9], "label": "dog"}]
    row = {"image": "a.png", "query": "cats and dogs", "objects": found}
    prompt, empty = read(home, row, {**row, "objects": []}, demo="{answer}")
    assert prompt.target.labels == ("cat", "dog")
    assert detection_map([prompt, empty], [prompt.answers[0], empty.answers[0]]) == pytest.approx([1, 1])
    assert empty.answers[0].text == "[]"


def test_rows_of_vlm_r1_are_read_as_published(home):
    def row(answer):
        turns = [{"from": "human", "value": "<image>Where is it?"}, {"from": "gpt", "value": answer}]
        return {"image": "a.png", "conversations": turns}

    listed = '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]\n```'
    prompts = read(home, row([1, 2, 3, 4]), row("<answer>[1, 2, 3, 4]</answer>"), row(listed), row("None"))
    assert [prompt.target.boxes for prompt in prompts] == [((1, 2, 3, 4),)] * 3 + [()]
    assert prompts[2].target.labels == ("cat",)
    assert said(prompts[0]) == ["a.png", "Where is it?"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [1, 2, 3]}, "wanted a list of 4 as `bbox`"),
        ({"bbox": None}, "wanted a list of 4 as `bbox`"),
        (
            {"bbox": [5, 2, 3, 4]},
            "wanted a box with left < right and top < bottom as `bbox`, got \\[5, 2, 3, 4",
        ),
        ({"bbox": ["x", 2, 3, 4]}, "wanted a finite number as `bbox\\[0\\]`"),
        ({"image": None}, "wanted one image as `image`, got None"),
        ({"image": ["a.png", "b.png"]}, "wanted one image as `image`"),
        ({"image": "../a.png"}, "leaves its root"),
        ({"query": ""}, "wanted a text as `query`"),
        ({"objects": [{"bbox_2d": [0, 0, 1, 1]}]}, "wanted a text as `objects\\[0\\].label`"),
        ({"conversations": [{"value": "a"}, {"value": "here"}]}, "wanted four numbers, or a JSON list"),
        ({"conversations": [{"value": "a"}]}, "wanted a list of 2 as `conversations`"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(home, change, message):
    with pytest.raises(RowError, match=f"rows.jsonl:1: .*{message}"):
        read(home, {**ROW, **change})
    assert len(read(home, {**ROW, **change}, {**ROW, "id": "b"}, bad_rows="drop")) == 1


# ---- steps

RET = {
    "step_type": "ret",
    "problem": "<image>Origin question: who is it?",
    "system": "Decompose.",
    "answer": {"query": "Who painted it?", "retriever": ["Text Image Retriever"]},
}
ANS = {"step_type": "ans", "problem": "Answer: who is it?", "answer": ["Rembrandt", "van Rijn"]}
STEPS = {"images": ["a.png"], "steps": [RET, ANS]}


def read_steps(home, *rows, **options):
    return read(home, *rows, reader=stepwise, **options)


def test_every_step_is_a_prompt_of_its_own(home):
    route, answer = read_steps(home, {**STEPS, "id": "q"})
    assert (route.uid, answer.uid) == ("q/0", "q/1")
    assert [message.role for message in route.messages] == ["system", "user"]
    assert said(route) == ["a.png", "Origin question: who is it?"]
    assert said(answer) == ["Answer: who is it?"], "a step without a mark shows no image"
    assert route.target == {"query": "Who painted it?", "retriever": ["Text Image Retriever"]}
    assert answer.target == ("Rembrandt", "van Rijn")
    assert (route.columns["step_type"], answer.columns["row"]) == ("ret", "q")


def test_the_format_of_a_step_is_that_of_its_kind(home):
    route, answer = read_steps(home, STEPS)
    text = "<think>so</think><sub-question>who?</sub-question><ret>none</ret>"
    assert tag_format([route, answer], [Outcome(text=text)] * 2) == [1, 0]


def test_steps_of_one_kind_and_a_limit(home):
    other = {"steps": [ANS]}
    assert [p.uid for p in read_steps(home, STEPS, other, steps="ans")] == ["rows#0/1", "rows#1/0"]
    assert len(read_steps(home, STEPS, other, limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"steps": []}, "rows.jsonl:1: wanted at least one of `steps`"),
        ({"steps": [3]}, "rows.jsonl:1: wanted an object as `steps\\[0\\]`"),
        (
            {"steps": [{**ANS, "step_type": "talk"}]},
            "rows.jsonl:1 steps\\[0\\]: wanted ret or ans as `step_type`",
        ),
        ({"steps": [ANS, {**ANS, "answer": None}]}, "rows.jsonl:1 steps\\[1\\]: wanted a text as `answer`"),
        ({"steps": [{**RET, "problem": "who?", "answer": "x"}]}, "wanted an object as `answer`"),
        (
            {"steps": [{**RET, "answer": {"query": "x", "retriever": []}}], "images": ["a.png"]},
            "at least one name",
        ),
        ({"steps": [RET]}, "the text marks image, but the row holds nothing"),
        ({"steps": [{**ANS, "problem": None}]}, "wanted a text as `problem`"),
    ],
)
def test_a_step_that_cannot_be_used_is_named(home, row, message):
    with pytest.raises(RowError, match=message):
        read_steps(home, row)


def test_prompts_of_rows_without_boxes_have_other_rewards():
    assert box_iou([Prompt("a", (), "x")], [Outcome(text="[0, 0, 1, 1]")]) == [None]
