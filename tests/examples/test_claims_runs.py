"""The claims of TP-GRPO, the curricula and Vision-Zero: their data, and all of each at a small size."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from benchmarks.claims import curricula, tp_grpo, vision_zero
from benchmarks.claims.corners import CORNERS, brightest, drawing, likeness, right_corner
from mmrl.core.types import Message, Outcome, Part, Prompt


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_likeness_jumps_where_an_image_shows_another_corner():
    prompt = Prompt("0", (Message("user", (Part("apple"),)),))
    shown = [Outcome(image=drawing(corner).byte()) for corner in range(CORNERS)]
    assert [brightest(one.image) for one in shown] == [0, 1, 2, 3]
    assert right_corner([prompt] * 4, shown) == [1.0, 0.0, 0.0, 0.0]
    # Two of four quarters differ by 215 - 40 = 175: 1 - 175 / 2 / 255.
    assert likeness([prompt] * 2, shown[:2]) == pytest.approx([1.0, 1 - 175 / 510])


def test_a_fifth_of_the_prompts_can_be_learned_and_none_is_held_out(tmp_path):
    curricula.write_data(tmp_path, seed=0, each=40)
    train, held_out, lessons = (
        lines(tmp_path / f"{name}.jsonl") for name in ("train", "held_out", "lessons")
    )
    assert set(Counter(row["source"] for row in train).values()) == {40} and len(train) == 200
    assert not {row["question"] for row in held_out} & {row["question"] for row in lessons}
    for row in train:
        if row["source"] == "learnable":
            place, _, *words = row["question"].rstrip("?").split()
            assert row["answer"] == words[curricula.ASKED.index(place)] and row["shown"] in words
        else:
            assert (row["answer"] == row["shown"]) == row["source"].startswith("easy")
    asked = [row for row in lessons if row["source"] == "learnable"]
    right = sum(row["answer"] == row["shown"] for row in asked) / len(asked)
    assert right == pytest.approx(curricula.RIGHT, abs=0.1)


def test_half_of_the_questions_about_a_cell_name_its_colour_or_another(tmp_path):
    vision_zero.write_source(tmp_path, 0, {"test": 8})
    asked = json.loads((tmp_path / "test" / "questions.json").read_text())
    colours = {number: answer for question, answer, number in asked if question.startswith("what")}
    named = [(q.split()[3], answer, number) for q, answer, number in asked if q.startswith("is")]
    assert [answer for *_, answer, _ in named] == ["no", "yes"] * 4
    assert all((colours[number] == colour) == (answer == "yes") for colour, answer, number in named)
    assert len(list((tmp_path / "test" / "images").iterdir())) == 8


SMALLER = {
    tp_grpo: {"GROUP": 2, "STEPS": 6, "STOCHASTIC": [0, 5]},
    curricula: {"PROMPTS": 4, "GROUP": 2},
    vision_zero: {"CIVILIANS": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLER, ids=lambda script: script.__name__)
def test_a_quick_run_writes_a_table_and_a_second_one_trains_nothing(script, tmp_path, monkeypatch):
    if script is tp_grpo:
        pytest.importorskip("diffusers")
    for constant, size in SMALLER[script].items():
        monkeypatch.setattr(script, constant, size)
    threads = torch.get_num_threads()
    asked = ["--quick", "--runs", str(tmp_path / "runs")]
    try:
        assert script.main(asked) == 0
        (place,) = (tmp_path / "runs_quick").glob("claims_*.json")
        found = json.loads(place.read_text())
        monkeypatch.setattr(script, "train_one", lambda *given: 1 / 0)
        assert script.main(asked) == 0
    finally:
        torch.set_num_threads(threads)
    assert json.loads(place.read_text()) == found and found["seeds"] == [0]
    assert found["rows"][0]["name"] == found["baseline"] and found["rows"][0]["gain"] == [0.0, 0.0, 0.0]
    for row in found["rows"]:
        assert 0 <= row["mean"] <= 1 and len(row["by_seed"]) == 1
