"""The demo of web pages: its lessons, its table, and all of it at a small size where there is a browser."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image, ImageDraw

from examples.browser_clicks import click_lessons, demo
from examples.browser_clicks.click_lessons import ClickLessons
from examples.video_grounding.demo import build
from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.tool_calls import parse_calls
from mmrl.vision.datasets.conversations import conversations
from mmrl.vision.environments.browser import Browser
from mmrl.vision.environments.browser_tasks import Task
from mmrl.vision.environments.chromium import find_chromium
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.tools.call_formats import parser_of
from mmrl.vision.tools.functions import Tool

SQUARES = {"red": (0, 0), "blue": (1, 0), "green": (2, 2)}  # column and row


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Drawn:
    """Shows a page without a browser."""

    def __init__(self, *, size, cells, executable):
        self.image = Image.new("RGB", (size, size), "white")
        for color, (column, row) in SQUARES.items():
            box = [16 * column, 16 * row, 16 * column + 15, 16 * row + 15]
            ImageDraw.Draw(self.image).rectangle(box, click_lessons.COLORS[color])

    def reset(self, seed, task):
        return [{}, {"image": self.image}]


@pytest.mark.parametrize("aim", [1.0, 0.0])
def test_lessons_click_what_is_named_unless_they_miss(monkeypatch, tmp_path, aim):
    monkeypatch.setattr(click_lessons, "Browser", Drawn)
    options = {"num_train": 3, "num_test": 2, "labelled": 6, "aim": aim}
    built = ClickLessons(stream=Stream(0), **options).build(tmp_path)
    assert built == {"train": 3, "test": 2, "lessons": 6 * 4}
    seeds = [row["seed"] for name in ("train", "test") for row in lines(tmp_path / f"{name}.jsonl")]
    assert len(set(seeds)) == 5
    hits = []
    for row in lines(tmp_path / "lessons.jsonl"):
        assert row["answer"] == row["completion"]  # so that `exact_match` is 1 for every lesson
        if row["completion"] == "done":
            assert row["prompt"][-1]["content"] == "The task is over."
            continue
        (call,) = parse_calls(row["completion"])
        x, y = call.arguments["coordinate"]
        assert {x % 8, y % 8} == {4} and max(x, y) < 48  # as single tokens
        assert f"the {row['color']} square" in row["prompt"][1]["content"]
        hits.append((x // 16, y // 16) == SQUARES[row["color"]])
    assert all(hits) if aim else 0 <= sum(hits) < 9


def test_a_lesson_has_the_tokens_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(click_lessons, "Browser", Drawn)
    ClickLessons(stream=Stream(0), num_train=1, num_test=1, labelled=1).build(tmp_path)
    build("examples/browser_clicks/model.yaml", tmp_path / "model", 0)
    encoder = Tokens(model=str(tmp_path / "model"), dtype="float32").prompt_encoder
    lesson, *_ = conversations(path=str(tmp_path / "lessons.jsonl"))
    schemas = (Tool.of(Browser.__new__(Browser).computer_use).schema,)
    assert parser_of(encoder, schemas, parse_calls) is parse_calls  # as the template writes a call
    system, user = lesson.messages
    played = encoder.encode(type(lesson)(lesson.uid, (user,)), schemas)
    assert played.ids.tolist() == encoder.encode(lesson).ids.tolist()
    assert system.parts[0].text == "computer_use"
    assert len(encoder.answer(lesson.answers[0].text)) == 6  # two numbers, three texts around them, the end


def test_accuracies_are_means_over_seeds_and_gains_are_paired():
    clicks = {"lessons": [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])], "grpo": [torch.ones(2)] * 2}
    shown = demo.compared(clicks)
    assert {name: one.metrics["accuracy"] for name, one in shown.items()} == {
        "start": 0.25, "GRPO": 1.0, "gain": 0.75,
    }  # fmt: skip
    assert shown["gain"].intervals["accuracy"] == (0.5, 1.0)


def test_a_fixed_click_hits_the_cell_that_is_most_often_the_named_one(monkeypatch, tmp_path):
    def page(seed):  # the other square is always in the same cell
        wanted, place = [("red", "1 / 2"), ("blue", "3 / 1"), ("red", "3 / 1")][seed]
        squares = {place: click_lessons.COLORS[wanted], "2 / 2": click_lessons.COLORS["green"]}
        html = "".join(f'<i style="grid-area: {at}; background: {color}">' for at, color in squares.items())
        return Task("", html, {"end": [wanted]})

    monkeypatch.setattr(demo, "make_task", lambda name, seed: page(seed))
    (tmp_path / "test.jsonl").write_text("".join(f'{{"seed": {seed}}}\n' for seed in range(3)))
    assert demo.fixed_clicks(tmp_path / "test.jsonl").tolist() == [0.0, 1.0, 1.0]


def test_a_fixed_click_on_real_pages_is_near_one_of_nine_cells(tmp_path):
    (tmp_path / "test.jsonl").write_text("".join(f'{{"seed": {seed}}}\n' for seed in range(900)))
    assert 1 / 9 <= float(demo.fixed_clicks(tmp_path / "test.jsonl").mean()) < 0.15


@pytest.mark.slow
def test_the_demo_runs_at_a_small_size(tmp_path):
    pytest.importorskip("playwright", reason="needs the extra `browser`")
    try:
        find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))
    small = ["max_steps=1", "rollout.num_prompts=2"]
    changes = {
        "pages": ["build.num_train=4", "build.num_test=4", "build.labelled=2"],
        "lessons": small,
    }
    summary = demo.demo(tmp_path, 0, 1, [*small, "rollout.num_generations=2"], changes)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert set(summary) >= {"fixed click", "start", "GRPO", "gain"}
    assert "Click what is named" in (tmp_path / "report.html").read_text()
