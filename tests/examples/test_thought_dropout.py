"""The benchmark of thought dropout: its rows, and what it sums up."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from benchmarks.thought_dropout import ARMS, make_rows, summary


def numbers(tokens, accuracy):
    return {"tokens": tokens, "accuracy": accuracy}


def test_the_summary_averages_over_seeds_and_compares_dropped_with_whole_thoughts():
    tokens = {"answers alone": (4, 4), "always a thought": (10, 14), "half dropped (TON)": (6, 6)}
    runs = {
        arm: [{"tuned": numbers(20, 0.5), "grpo": numbers(n, n / 20)} for n in pair]
        for arm, pair in tokens.items()
    }
    found = summary(runs)
    assert found["arms"]["always a thought"]["grpo"]["tokens"] == [12, pytest.approx(8**0.5)]
    assert found["tokens saved by dropping"] == 0.5
    assert found["accuracy gained by dropping"] == pytest.approx(0.3 - 0.6)
    assert list(found["arms"]) == list(ARMS)


def test_a_thought_is_what_the_questions_about_an_image_reveal(tmp_path):
    asked = [
        ["what shape is in the image?", "circle", 0],
        ["is there a blue shape?", "yes", 0],
        ["is there a red shape?", "no", 1],  # reveals neither
    ]
    for split in ("train", "test"):
        images = tmp_path / "data" / split / "images"
        images.mkdir(parents=True)
        (images.parent / "questions.json").write_text(json.dumps(asked))
        for number in (0, 1):
            Image.new("RGB", (4, 4)).save(images / f"{number}.png")
    make_rows(tmp_path / "rows", str(tmp_path / "data"))
    lines = (tmp_path / "rows/thoughts_train.jsonl").read_text().splitlines()
    assert [(row["answer"], row["thought"]) for row in map(json.loads, lines)] == [
        ("circle", "a blue circle"),
        ("yes", "a blue circle"),
    ]
    seen = [json.loads(line)["shown"] for line in (tmp_path / "rows/seen.jsonl").read_text().splitlines()]
    assert seen == ["<answer>circle</answer>", "<answer>yes</answer>", "<think>a blue circle</think>"]
