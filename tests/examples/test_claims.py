"""Shared code of the claims benchmarks: paired gains, stored runs and the table."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import torch

from benchmarks.claims import common, tempsamp_r1, ton, urpa, videos
from benchmarks.claims.table import table


def run(seed, *values):
    return {"seed": seed, "answers": {"mIoU": dict(zip("abcd", values, strict=True))}, "seconds": 2.0}


def test_a_gain_is_paired_by_seed_and_prompt():
    base = [run(0, 0.0, 0.2, 0.4, 0.6), run(1, 0.1, 0.3, 0.5, 0.7)]
    better = [run(0, 0.1, 0.3, 0.5, 0.7), run(1, 0.2, 0.4, 0.6, 0.8)]
    row = common.row("better", better, base, "mIoU")
    assert row["mean"] == 0.45 and row["by_seed"] == [0.4, 0.5]
    assert row["gain"] == (0.1, 0.1, 0.1)  # every pair differs by 0.1, whatever is drawn
    assert common.outcome(row["gain"]) == "appears"
    assert common.outcome((0.1, -0.1, 0.3)) == "does not appear"
    assert common.outcome((-0.1, -0.2, -0.1)) == "the opposite appears"


def test_a_finished_run_is_read_again(tmp_path):
    path = tmp_path / "new" / "run.json"
    first = common.once(path, lambda: {"seed": 3})
    assert first["seed"] == 3 and first["seconds"] >= 0
    assert common.once(path, dict) == first


def test_results_become_one_table(tmp_path):
    given = common.options("some", "Headline.", ["--output", str(tmp_path / "claims_some.json")])
    claim = common.Claim(method="SOME", baseline="GRPO", claim="c", situation="s", measure="m")
    base, better = [run(0, 0.0, 0.0, 0.0, 0.0)], [run(0, 0.5, 0.5, 0.5, 0.5)]
    rows = [common.row("GRPO", base, base, "mIoU"), common.row("SOME", better, base, "mIoU")]
    common.leave(given, claim, 0.1, rows, "appears: it does", [*base, *better])
    found = json.loads((tmp_path / "claims_some.json").read_text())
    assert found["seconds"] == 4.0 and found["command"] == "python -m benchmarks.claims.some"
    assert table(tmp_path).splitlines()[2:] == [
        "| SOME | GRPO | mIoU | 0.000 | 0.000 |  | appears |",
        "|  | SOME | mIoU | 0.500 | 0.500 | +0.500 (+0.500 to +0.500) |  |",
    ]


def test_a_video_shows_its_scenes_at_their_seconds():
    kind = videos.Scenes(seconds=32, noise=0.0)
    frames, scenes = videos.draw(kind, random.Random(5))
    assert frames.shape == (32, 3, 28, 28) and len(scenes) == len({colour for colour, *_ in scenes}) == 3
    shown = frames.double().mean((2, 3))
    coloured = set()
    for colour, start, end in scenes:
        assert start % 2 == end % 2 == 0 and 4 <= end - start <= 8
        wanted = torch.tensor(videos.COLOURS[colour], dtype=torch.float64).expand(end - start, 3)
        torch.testing.assert_close(shown[start:end], wanted, atol=1.0, rtol=0)
        coloured |= set(range(start, end))
    grey = shown[[second for second in range(32) if second not in coloured]]
    torch.testing.assert_close(grey, torch.full_like(grey, videos.GREY), atol=1.0, rtol=0)


def test_a_thought_adds_up_to_the_answer(tmp_path):
    rows = [json.loads(line) for line in ton.make_rows(tmp_path, "train", 5).read_text().splitlines()]
    for row in rows:
        cells = re.findall("[a-z]+", row["thought"])
        assert len(cells) == 8
        if "#sum" in row["id"]:
            total = sum(ton.NUMBERS[cell] for cell in cells)
            assert row["answer"] == str(total % 10) == row["thought"][-1]
        else:
            assert row["answer"] == cells[int(row["id"].partition("#color")[2])]
    assert sum("#sum" in row["id"] for row in rows) == 5 and len(rows) == 15


def test_the_verdict_of_ton_wants_shorter_and_no_less_right_answers():
    shorter, right = (-10.0, -12.0, -5.0), (0.0, -0.04, 0.04)
    assert ton.verdict_of(shorter, right, 22.0) == "appears"  # more than 4.4 of 22 tokens are saved
    assert ton.verdict_of(shorter, right, 26.0) == "does not appear"  # 5 are not a fifth of 26
    assert ton.verdict_of(shorter, (-0.1, -0.2, 0.0), 22.0) == "does not appear"


FEW = {"PROMPTS": 2, "GENERATIONS": 2}
SMALLER = {tempsamp_r1: {**FEW, "LONG": replace(tempsamp_r1.LONG, seconds=16, scenes=2)}, urpa: {}, ton: FEW}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLER, ids=lambda script: script.__name__)
def test_a_quick_run_leaves_a_result(script, tmp_path, monkeypatch):
    for constant, size in SMALLER[script].items():
        monkeypatch.setattr(script, constant, size)
    name = script.__name__.rpartition(".")[2]
    assert script.main(["--quick", "--runs", str(tmp_path / name)]) == 0
    found = json.loads((tmp_path / f"{name}_quick" / f"claims_{name}.json").read_text())
    assert found["method"] == script.CLAIM.method and found["seeds"] == [0]
    names = [row["name"] for row in found["rows"]]
    assert script.CLAIM.method in names and script.CLAIM.baseline in names
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert script.main(["--quick", "--runs", str(tmp_path / name)]) == 0  # reads what is there
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert {path for path in again if again[path] != before.get(path)} == {
        tmp_path / f"{name}_quick" / f"claims_{name}.json"
    }
