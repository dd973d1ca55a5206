"""Predictions as parquet: what a row holds, what counts as correct, which files there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from pyarrow import parquet

from mmrl.core.reward_table import Measured
from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.data.dataset_io import Rows, read_prompts
from mmrl.reporting.answers import (
    CORRECT,
    drop_predictions,
    judge_of,
    parts_of,
    setting_file,
    step_file,
    target_text,
    write_predictions,
)
from tests.support.tables import reward_table
from tests.support.toys import prompts


@dataclass(frozen=True)
class Span:
    start: float
    end: float


def measured(rewards, *, media=(), process=(), rank=0) -> Measured:
    """An evaluation of one answer a prompt."""
    count = len(next(iter(rewards.values())))
    table = reward_table(rewards, group=[f"p{i}" for i in range(count)], process=process)
    rows = []
    for i, prompt in enumerate(prompts(num=count)):
        message = Message("user", (*(Part(media=medium) for medium in media), Part(f"say {i}")))
        asked = replace(prompt, messages=(message,), split="test")
        rows.append(Trajectory(asked, asked.uid, (Outcome(text=f"answer {i}"),), None, 2))
    table = table.replace(rank=rank)
    mine = tuple(row for row, own in zip(rows, table.mine.tolist(), strict=True) if own)
    return Measured({}, {}, mine, table)


def test_predictions_hold_prompt_target_answer_and_every_reward(tmp_path):
    grey = torch.full((1, 3, 10, 20), 90, dtype=torch.uint8)
    image = Media("image", "a/b.jpg", lambda: Frames(grey, torch.zeros(1)))
    write_predictions(
        tmp_path / "p.parquet", measured({"iou": [0.5, 1.0], "right": [1.0, None]}, media=[image]), images=1
    )
    table = parquet.read_table(tmp_path / "p.parquet")
    columns = table.to_pydict()
    nan = pytest.approx(math.nan, nan_ok=True)
    seen = columns.pop("seen")
    assert columns == {
        "uid": ["p0", "p1"],
        "split": ["test", "test"],
        "prompt": ["say 0", "say 1"],
        "media": [["a/b.jpg"], ["a/b.jpg"]],
        "target": ["1", "2"],
        "completion": ["answer 0", "answer 1"],
        "length": [2, 2],
        "reward": [1.5, 1.0],
        "reward/iou": [0.5, 1.0],
        "reward/right": [1.0, nan],
        "correct": [True, None],
    }
    assert table.schema.metadata == {CORRECT: b"right"}
    # One prompt keeps its thumbnail: the one with the lowest value that is known.
    assert seen[0][:2] == b"\xff\xd8" and seen[1] is None


def test_the_reward_of_most_weight_says_what_is_correct():
    table = reward_table({"short": [1.0, 0.0], "right": [0.8, 0.2], "form": [1.0, 0.0]})
    table = table.replace(weights={"short": 0.2, "right": 1.0, "form": 0.1})
    assert judge_of(table) == ""  # shares say nothing of correct, and the length says nothing of it either
    assert judge_of(table, "form") == "form" and judge_of(table, "right") == ""
    assert judge_of(table.replace(weights={"short": 0.2, "right": 0.1, "form": 1.0})) == "form"


def test_the_first_reward_of_only_0_and_1_says_what_is_correct(tmp_path):
    assert judge_of(reward_table({"iou": [0.5, 1.0], "right": [0.0, 1.0], "form": [1.0, 1.0]})) == "right"
    assert judge_of(reward_table({"right": [None, 1.0]})) == "right"
    assert judge_of(reward_table({"iou": [0.5, 1.0], "absent": [None, None]})) == ""
    write_predictions(tmp_path / "p.parquet", measured({"iou": [0.5, 1.0]}))
    assert "correct" not in parquet.read_schema(tmp_path / "p.parquet").names


def test_thumbnails_are_of_the_worst_prompts_and_of_made_images(tmp_path):
    black = torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
    shown = Media("image", "a.jpg", lambda: Frames(black, torch.zeros(1)))
    one = measured({"iou": [0.9, 0.1, 0.5, 0.0]}, media=[shown])
    painted = tuple(replace(row, outcomes=(Outcome(image=black[0]),)) for row in one.rollouts)
    write_predictions(tmp_path / "p.parquet", replace(one, rollouts=painted), images=2)
    columns = parquet.read_table(tmp_path / "p.parquet").to_pydict()
    assert [cell is not None for cell in columns["seen"]] == [False, True, False, True]
    assert [cell is not None for cell in columns["made"]] == [False, True, False, True]
    assert columns["completion"] == [None] * 4


def test_several_processes_write_a_part_each_and_old_parts_go(tmp_path):
    path = tmp_path / "predictions.parquet"
    write_predictions(path, measured({"right": [1.0, 0.0]}))
    for rank in (1, 0):
        write_predictions(path, measured({"right": [1.0, 0.0]}, process=[0, 1], rank=rank), world=2)
    assert [part.name for part in parts_of(path)] == [
        "predictions-00000-of-00002.parquet",
        "predictions-00001-of-00002.parquet",
    ]
    assert [parquet.read_table(part)["uid"].to_pylist() for part in parts_of(path)] == [["p0"], ["p1"]]
    write_predictions(path, measured({"right": [1.0, 0.0]}))
    assert parts_of(path) == [path]


def test_predictions_after_a_step_are_dropped(tmp_path):
    for step in (0, 10, 20):
        write_predictions(step_file(tmp_path, step), measured({"right": [1.0]}))
    write_predictions(setting_file(tmp_path, "a/b c"), measured({"right": [1.0]}))
    drop_predictions(tmp_path, 10)
    names = sorted(path.name for path in (tmp_path / "predictions").iterdir())
    assert names == ["a%2Fb c.parquet", "step-000000.parquet", "step-000010.parquet"]


def test_targets_are_texts_or_json():
    assert target_text(None) is None and target_text("é 3") == "é 3"
    assert target_text(["a", "é"]) == '["a", "é"]'
    assert target_text(Span(1.0, 2.5)) == '{"start": 1.0, "end": 2.5}'
    assert target_text(torch.tensor([1.0, 2.0])) == "[1.0, 2.0]"


def test_a_prompt_knows_the_split_of_its_row(tmp_path):
    path = tmp_path / "train-00000-of-00001.jsonl"
    path.write_text('{"q": "a"}\n{"q": "b", "split": "test"}\n')

    def make(row, number):
        return Prompt(str(number), (Message("user", (Part(row.columns["q"]),)),))

    made = read_prompts(path, Rows(path, tmp_path), make)
    assert [prompt.split for prompt in made] == ["train", "test"]
