"""Rewards that do not fit the rows or what a model makes are refused before weights are loaded."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from mmrl.build import build
from mmrl.cli import main
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.config.schema import Config, parse
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Message, Part, Prompt
from mmrl.diagnostics.reward_inputs import check_reward_inputs
from tests.diffusion import tiny_flux_kontext, tiny_wan  # noqa: F401  registers their makers
from tests.diffusion.test_flow_runs import plan
from tests.support.toys import plan as toy_plan

FUNCTION = "tests.diffusion.test_reward_inputs:between"


def between(before, after):
    """Interpolate frames by their mean."""
    return (before + after) / 2


@pytest.fixture
def given(checkpoint, tmp_path):
    """Write a configuration of a tiny model, and rows for it; returns the file, and its content."""
    Image.new("RGB", (32, 32), (200, 20, 30)).save(tmp_path / "a.png")

    def write(name, reward, *rows, **engine):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind = "diffusion.edits" if "image" in rows[0] else "diffusion.prompts"
        data = {"name": kind, "path": str(tmp_path / "rows.jsonl")}
        changes = {"policy": {"max_sequence_length": 16}, "rollout": {"engine": {"0": engine}}}
        raw = plan(checkpoint(name), tmp_path / "run", "diffusion.transition", data=data, **changes)
        raw["rewards"] = [reward]
        (tmp_path / "run.yaml").write_text(json.dumps(raw))
        return str(tmp_path / "run.yaml"), raw

    return write


TEXT, EDIT = {"prompt": "red"}, {"image": "a.png", "prompt": "red"}
SMOOTH = {"name": "diffusion.motion_smoothness", "interpolate": FUNCTION}
UNIFIED = {"name": "diffusion.unified_reward", "engine": "vision.generate"}
DIRECTION = {"name": "diffusion.clip_direction", "after": "new"}
MISFITS = [
    (
        "flux_kontext",
        "diffusion.edit_reward",
        TEXT,
        "needs a source image, and row 'rows#1' has none (1",
    ),
    ("flux_kontext", {**UNIFIED, "form": "video"}, TEXT, "scores videos, but the outcomes are images (row"),
    ("flux_kontext", DIRECTION, {**EDIT, "original_prompt": "a"}, "needs a text in the column 'new'"),
    ("wan", SMOOTH, TEXT, "scores videos of at least 3 frames, not 1"),
    ("wan", "diffusion.dynamic_degree", {**TEXT, "num_frames": 5}, "at least 128 pixels a side, not 32 x 32"),
]


@pytest.mark.parametrize(("model", "reward", "row", "message"), MISFITS)
def test_rewards_that_do_not_fit_are_refused(given, capsys, model, reward, row, message):
    path, _ = given(model, reward, row)
    assert main(["check", path]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    name = reward if type(reward) is str else reward["name"]
    assert f"rewards[0]: '{name.partition('.')[2]}' " in line and message in line


def test_a_run_does_not_start_with_a_reward_that_does_not_fit(given, monkeypatch):
    monkeypatch.setattr("mmrl.build.Processes", lambda *of: pytest.fail("weights would be loaded next"))
    _, raw = given("sd3", "diffusion.video_align", TEXT)
    with pytest.raises(ConfigError, match="'video_align' scores videos, but the outcomes are images"):
        build(parse(raw, Config), quiet=True)


def test_masks_are_missed_only_if_no_row_has_one(given, tmp_path, capsys):
    path, _ = given("flux_kontext", "diffusion.unmasked_identity", EDIT)
    assert main(["check", path]) == 0, "a later row may have one"
    capsys.readouterr()
    assert main(["check", path, "--data"]) == 2
    assert "'unmasked_identity' reads `mask`, which no row of the data has" in capsys.readouterr().out
    assert main(["check", path, "--data", "rewards.0.on_absent=warn"]) == 0
    shutil.copy(tmp_path / "a.png", tmp_path / "mask.png")
    path, _ = given("flux_kontext", "diffusion.unmasked_identity", EDIT, {**EDIT, "mask": "mask.png"})
    assert main(["check", path, "--data"]) == 0


@pytest.mark.parametrize(
    ("model", "reward", "row"),
    [
        ("flux_kontext", DIRECTION, {**EDIT, "original_prompt": "a", "new": "b"}),
        ("wan", SMOOTH, {**TEXT, "num_frames": 5}),
    ],
)
def test_rewards_that_fit_pass(given, model, reward, row):
    path, _ = given(model, reward, row)
    assert main(["check", path]) == 0


def test_only_rows_that_match_where_are_asked(given):
    rows = ({**TEXT, "kind": "new"}, {"image": "a.png", "prompt": "blue", "kind": "edit"})
    path, raw = given("flux_kontext", {"name": "diffusion.edit_reward", "where": {"kind": "edit"}}, *rows)
    prompts = [Prompt(row["prompt"], (Message("user", (Part(row["prompt"]),)),), columns=row) for row in rows]
    config = parse(raw, Config)
    check = lambda rows: check_reward_inputs(False, lambda: None, rows, config.rewards, "rewards")
    check(prompts[:1])
    with pytest.raises(ConfigError, match=r"row 'blue' has none \(1 of 1 rows\)"):
        check(prompts)


def test_a_model_of_texts_makes_no_images(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What?", "answer": "this"}\n')
    raw = toy_plan(tmp_path / "out", data={"name": "vision.visual_qa", "path": str(rows)})
    raw |= {"policy": {"name": "vision.tokens", "model": "Qwen/Qwen2.5-VL-3B-Instruct"}}
    raw |= {"rewards": ["diffusion.hpsv3"]}
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "'hpsv3' scores images or videos, but the outcomes are texts" in capsys.readouterr().out


VIDEO, IMAGE = frozenset({"video"}), frozenset({"image"})
DECLARED = {
    "edit_reward": [({}, RewardInputs(VISUAL, source=True))],
    "edit_score": [({}, RewardInputs(IMAGE, source=True))],
    "unified_reward": [
        ({}, RewardInputs(IMAGE)),
        ({"form": "video"}, RewardInputs(VIDEO)),
        ({"form": "edit"}, RewardInputs(IMAGE, source=True)),
    ],
    "clip_direction": [({"after": "b"}, RewardInputs(VISUAL, source=True, texts=("original_prompt", "b")))],
    "unmasked_identity": [({}, RewardInputs(VISUAL, source=True, optional=("mask",)))],
    "video_align": [({}, RewardInputs(VIDEO, min_frames=2))],
    "dynamic_degree": [({}, RewardInputs(VIDEO, min_frames=2, min_side=128))],
    "motion_smoothness": [({}, RewardInputs(VIDEO, min_frames=3))],
    "hpsv3": [({}, RewardInputs(VISUAL))],
}


@pytest.mark.parametrize("name", DECLARED)
def test_rewards_say_what_they_read(name):
    entry = find("reward", f"diffusion.{name}")
    for options, inputs in DECLARED[name]:
        assert entry.inputs(options) == inputs
    assert find("reward", "exact_match").inputs({}) is None
