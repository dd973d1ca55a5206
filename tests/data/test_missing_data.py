"""A missing or empty data file is a mistake of the configuration: exit code 2, before a weight is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
NO_WEIGHTS = "policy.model=there-is-no-such-model"
TRAIN = {  # configuration, and its overrides but the path
    "grounding": ("examples/video_grounding/grpo.yaml", "data.root=."),
    "visual_qa": ("examples/visual_qa/train.yaml",),
    "preference_pairs": ("examples/preference_pairs/dpo.yaml",),
}
MEASURED = ("evaluate/pope.yaml", "evaluate/closed_vocabulary.yaml", "evaluate/charades_sta.yaml")
BUILT = ("visual_qa", "converted", "temporal_grounding", "clip_pairs")
REASONS = ("there is no", "holds no", "the source is empty")


@pytest.fixture(params=["missing", "empty"])
def path(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if request.param == "empty":
        Path("rows.jsonl").write_text("\n")
    return "rows.jsonl"


def assert_wrong(arguments, capsys):
    assert main(arguments) == 2
    words = capsys.readouterr().err
    assert words.startswith("error: ") and "rows.jsonl" in words, words
    assert any(reason in words for reason in REASONS), words


@pytest.mark.parametrize("name", TRAIN)
def test_train(path, capsys, name):
    config, *more = TRAIN[name]
    assert_wrong(["train", str(ROOT / config), f"data.path={path}", NO_WEIGHTS, *more], capsys)


@pytest.mark.parametrize("config", MEASURED)
def test_evaluate(path, capsys, tmp_path, config):
    Path("words.json").write_text('{"objects": {"dog": ["puppy"]}}')
    given = [f"evaluation.data.path={path}", "evaluation.data.root=.", NO_WEIGHTS]
    if "closed" in config:
        given.append("evaluation.data.ontology=words.json")
    if "charades" in config:
        given.append("evaluation.data.durations=''")
    assert_wrong(["evaluate", str(CONFIGS / config), *given], capsys)


@pytest.mark.parametrize("name", BUILT)
def test_build(path, capsys, name):
    given = [f"build.{'path' if 'grounding' in name else 'source'}={path}", "output=out"]
    if "grounding" in name:
        given += ["build.durations=''", "build.root=."]
    assert_wrong(["build", str(CONFIGS / f"build/{name}.yaml"), *given], capsys)


def test_data_check(path, capsys):
    assert_wrong(["data", "check", path], capsys)
