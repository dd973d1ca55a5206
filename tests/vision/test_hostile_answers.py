"""Whatever a model answers, every reward of texts gives a finite number or None, and soon."""

from __future__ import annotations

import math
import random
import time

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.clip_score import split_sentences
from mmrl.vision.benchmarks.amber import AmberScene, Words
from mmrl.vision.benchmarks.answer_rules import RULES
from mmrl.vision.benchmarks.time_spans import Moments
from tests.support.quick import FUZZ

MOMENTS = Moments(((1.0, 2.0),), 10.0, ((1.0, 2.0, 4.0),) * 5)
SCENE = AmberScene(("dog",), ("cat",), Words({"dog": ["puppy"], "cat": ["kitten"]}))
REWARDS = [
    *[("tag_format", {"tags": tags}, "x") for tags in ("", "answer", "think,answer,box")],
    ("think_format", {}, "x"),
    ("exact_match", {}, "x"),
    *[("vision.temporal_iou", {"form": form}, MOMENTS) for form in ("iou", "giou", "timestamp_aware")],
    *[("vision.temporal_iou", {"reader": r}, MOMENTS) for r in ("time_r1", "videochat_r1", "evaluator")],
    *[(f"vision.{name}", {}, MOMENTS) for name in (
        "span_set_iou", "consensus_span", "span_confidence", "window_ap", "highlight_ap", "highlight_hit",
        "saliency",
    )],
    *[("vision.short_answer", {"form": form}, "3") for form in ("text", "number", "letter")],
    *[("vision.binary_vqa", {"form": form}, "yes") for form in ("pope", "exact", "first_word")],
    *[("vision.benchmark_answer", {"form": form}, "3") for form in RULES],
    ("vision.object_mentions", {}, SCENE),
    ("vision.object_f1", {}, SCENE),
]  # fmt: skip
EACH = pytest.mark.parametrize(("name", "options", "target"), REWARDS)
PARTS = [
    "<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "<", ">", "1", "99", "9" * 308,
    "9" * 400, ".", "e9", "%", ",",
    " to ", " and ", "-", " ", "\n", "\t", "[", "]", "[[", "]]", "{", "}", '{"start_time": ', '"end_time": ',
    "NaN", "Infinity", "\\boxed{", "yes", "no", "A", "dog", "\0", "\ud800", "\udfff", "\u2028", "\u0660",
    "\U0001f600", "ı", "1 to 2", "[1, 2]", "1e999", "null", "'", '"', "_", "\\",
]  # fmt: skip


def measured(name, options, target, texts):
    reward = Pieces(Stream()).make("reward", Piece(name, options))
    prompt = Prompt("p", (), target)
    return reward([prompt] * len(texts), [Outcome(text=text) for text in texts])


@EACH
def test_hostile_answers(name, options, target):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=draw.choice([1, 5, 20, 100]))) for _ in range(FUZZ)]
    values = measured(name, options, target, texts)
    assert len(values) == FUZZ
    assert all(value is None or math.isfinite(value) for value in values)


SIZE = 15_000
LONG = {
    part: (part * SIZE)[:SIZE]
    for part in (
        "1", "1.", "1,", "1 to ", "1e", " ", "\n", "[", "[ ", "[[", "[[1]", "[[1],", "{", "<", "</",
        "<answer>", "</answer>", "<think>", "<think><answer>", "<think></think>", "\\boxed{", "a.", ".", "A ",
        "\0", "\ud800", "-", "yes", '{"start_time": 1}',
    )
} | {
    "spaces inside": "<think>x</think>" + " " * SIZE + "x",
    "spaces after a number": "1" + " " * SIZE + "x",
    "spaces after a unit": "1 s" + " " * SIZE + "x",
    "digits in an answer": f"<answer>{'1' * SIZE}</answer>",
    "openings in an answer": f"<answer>{'[[' * (SIZE // 2)}</answer>",
    "openings and an end": "[ " * (SIZE // 2) + "] ]",
    "many words": "word " * 30_000,
}  # fmt: skip


@pytest.mark.slow
@EACH
def test_long_answers_take_no_longer_than_they_are_long(name, options, target):
    for kind, text in LONG.items():
        began = time.process_time()
        values = measured(name, options, target, [text])
        assert time.process_time() - began < 1.5, kind  # about 0.1 s; quadratic time is minutes, cubic weeks
        assert all(value is None or math.isfinite(value) for value in values)


@pytest.mark.parametrize("part", [".", "!?", "Mr. ", ".)", " ", "a. "])
def test_long_captions_are_split_in_time(part):
    began = time.process_time()
    split_sentences((part * 30_000)[:30_000] + "x")
    assert time.process_time() - began < 25
