"""GenEval's rules over detections: worked clauses, the geometry of boxes, thresholds."""

from __future__ import annotations

import json

import pytest
import torch

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.diffusion.rewards.geneval import Geneval, confident, evaluate_clauses, official, relative_position


def box(x: float, y: float, size: float = 2.0) -> list[float]:
    """A square around a centre."""
    return [x - size / 2, y - size / 2, x + size / 2, y + size / 2]


def things(num: int, *colors: str, x: float = 0.0, y: float = 0.0) -> list[dict]:
    return [
        {"box": box(x, y), "score": 0.95 - i / 1000} | ({"color": colors[i % len(colors)]} if colors else {})
        for i in range(num)
    ]


def asking(include, tag: str = "", **columns) -> Prompt:
    return Prompt(
        uid="p",
        messages=(Message("user", (Part("draw"),)),),
        columns={"include": include, "tag": tag, **columns},
    )


def measured(found, include, tag: str = "", exclude=(), **options) -> float:
    prompt = asking(include, tag, exclude=exclude)
    return Geneval(**options)([prompt], [Outcome(tags={"detections": json.dumps(found)})])[0]


DOGS = {"class": "dog", "count": 2}
RED = {"class": "dog", "count": 2, "color": "red"}
LEFT = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]


# ---- clauses


@pytest.mark.parametrize(
    ("found", "include", "wanted"),
    [
        ({"dog": things(2)}, [DOGS], 1.0),
        ({"dog": things(3)}, [DOGS], 0.5),  # 1 - 1/2
        ({}, [DOGS], 0.0),
        ({"dog": things(5)}, [DOGS], -0.5),  # 1 - 3/2
        ({"dog": things(2, "red")}, [RED], 1.0),
        (
            {"dog": things(2, "red", "blue")},
            [RED],
            0.75,
        ),  # the number is right, half of the colours: 1 and 1/2
        ({"dog": things(1, "red")}, [RED], 0.25),  # 1 - 1/2, and 0 for colours of a wrong number
        ({"dog": things(1), "cat": things(1, x=9.0)}, LEFT, 1.0),  # 1, 1 and 1
        # 1 and 1 for the numbers, a wrong position counts 0 and then 1: half of the clause
        ({"dog": things(1, x=9.0), "cat": things(1)}, LEFT, 0.75),
        # 0 for the cat; 1 for the dog, which has nothing to stand left of: 0
        ({"dog": things(1)}, LEFT, 1 / 3),
        # 1 for the cat; 1 - 1/1 = 0 for two dogs, and 0 for their position
        ({"dog": things(2), "cat": things(1, x=9.0)}, LEFT, 1 / 3),
    ],
)
def test_the_reward_of_training_is_the_mean_of_what_is_asked(found, include, wanted):
    assert measured(found, include) == pytest.approx(wanted)
    assert measured(found, include, form="strict") == float(wanted == 1.0)


def test_a_negative_count_may_be_held_at_zero():
    found = {"dog": things(5), "cat": things(1)}
    include = [DOGS, {"class": "cat", "count": 1}]
    assert measured(found, include) == pytest.approx(0.25)  # (-.5 + 1) / 2
    assert measured(found, include, clamp=True) == pytest.approx(0.5)  # (0 + 1) / 2


def test_a_position_is_looked_at_only_where_the_colour_is_right():
    include = [LEFT[0], {**LEFT[1], "color": "red"}]
    found = {"dog": things(1, "blue"), "cat": things(1, x=9.0)}
    # 1 for the cat, 1 for the number of dogs, 0 for their colour
    assert evaluate_clauses(found, include, exact=True) == (False, [1.0, 1.0, 0.0])


# ---- strict and official


@pytest.mark.parametrize(("num", "tag", "strict", "benchmark"), [(2, "", 1, 1), (3, "", 0, 1), (1, "", 0, 0)])
def test_official_takes_more_than_asked(num, tag, strict, benchmark):
    found = {"dog": things(num)}
    assert measured(found, [DOGS], tag, form="strict") == strict
    assert measured(found, [DOGS], tag, form="official") == benchmark


def test_official_counting_is_exact():
    found = {"dog": things(3)}
    assert measured(found, [DOGS], "counting", form="official") == 0.0
    assert measured(found, [DOGS], exclude=[{"class": "dog", "count": 3}], form="official") == 0.0
    assert measured(found, [DOGS], exclude=[{"class": "dog", "count": 4}], form="official") == 1.0
    assert measured({"dog": things(2)}, [DOGS], "counting", form="official") == 1.0


def test_official_looks_at_the_surest():
    found = {"dog": things(3, "red", "red", "blue")}
    assert official(found, {"include": [RED]})
    assert not official({"dog": found["dog"][::-1]}, {"include": [RED]})
    assert official({"dog": things(1), "cat": things(2, x=9.0)}, {"include": LEFT})
    assert not official({"dog": things(1, x=9.0), "cat": things(1)}, {"include": LEFT})


# ---- what is detected


def test_only_sure_objects_count():
    scores = [0.3, 0.31, 0.9, 0.95]
    found = {"dog": [{"box": box(0, 0), "score": score} for score in scores]}
    assert [one["score"] for one in confident(found, "two_object")["dog"]] == [0.95, 0.9, 0.31]
    assert [one["score"] for one in confident(found, "counting")["dog"]] == [0.95]
    assert len(confident({"dog": things(20)}, "")["dog"]) == 16


@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        (-9, 0, {"left of"}),
        (9, 0, {"right of"}),
        (0, -9, {"above"}),
        (0, 9, {"below"}),
        (-9, 9, {"left of", "below"}),  # 8.6 / 12.73 = .676 on both axes
        # 3 - .4 of 9.49 is .27 across, 9 - .4 of 9.49 is .91 down
        (3, 9, {"below"}),
        (0.3, 0.2, set()),  # within a tenth of both sizes, .4
        (0, 0, set()),
        # .8 - .4 of .8 is exactly half, which is not beyond it; .81 is
        (0.8, 0, set()),
        (0.81, 0, {"right of"}),
    ],
)
def test_where_a_box_lies(x, y, wanted):
    assert relative_position(box(x, y), box(0, 0)) == wanted


def one_dog(picture, asked):
    assert picture.dtype == torch.uint8 and asked["tag"] == "single_object"
    return {"dog": [{"box": [0, 0, 1, 1], "score": float(picture[0, 0, 0]) / 255}]}


def test_a_detector_looks_at_the_image():
    prompt = asking([{"class": "dog", "count": 1}], "single_object")
    images = [torch.full((3, 4, 4), value, dtype=torch.uint8) for value in (200, 10)]
    reward = Geneval(detector=f"{__name__}:one_dog")
    assert reward([prompt] * 2, [Outcome(image=image) for image in images]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="neither an image nor a video"):
        reward([prompt], [Outcome(text="a dog")])


def test_detections_may_be_recorded_with_the_prompt():
    prompt = asking([DOGS], detections={"dog": things(2)})
    assert Geneval()([prompt], [Outcome()]) == [1.0]


def test_malformed_input_is_an_error():
    with pytest.raises(ValueError, match="found no detections for prompt 'p'; name a `detector`"):
        Geneval()([asking([DOGS])], [Outcome()])
    with pytest.raises(ValueError, match="needs the column `include`.* prompt 'p' lacks"):
        Geneval()([asking([], detections={})], [Outcome()])
    with pytest.raises(ValueError, match="gives none for a 'dog'; it gives .'box', 'score'."):
        measured({"dog": things(2)}, [RED])
    with pytest.raises(ValueError, match="geneval cannot import 'tests.nowhere:f'"):
        Geneval(detector="tests.nowhere:f")
