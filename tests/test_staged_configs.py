"""The ready run files of several stages: every stage is a run, and goes through on a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.build import build, check
from mmrl.config.loading import read
from mmrl.config.schema import Config, as_plain, parse
from mmrl.config.stages import load_stages
from mmrl.reporting import html
from mmrl.runtime.stages import read_stages
from mmrl.training.stages import check_stage_folders, train_stages

CONFIGS = Path(__file__).parents[1] / "configs"
STAGED = [path for path in sorted((CONFIGS / "train").glob("*.yaml")) if read(path).get("stages")]


@pytest.mark.parametrize("path", STAGED, ids=lambda path: path.stem)
def test_every_stage_is_a_run_that_goes_on_from_the_one_before(path):
    stages = load_stages(path)
    assert [stage.begins for stage in stages] == [None, *range(len(stages) - 1)]
    for stage in stages:
        check(stage.config)
    names = [stage.name for stage in stages]
    assert not any(name.isdigit() for name in names) and path.read_text().startswith("# ")


def test_there_are_the_files_of_the_published_recipes():
    assert {path.stem for path in STAGED} >= {
        "charades_sta_tempsamp_r1",
        "charades_to_unlabelled_urpa",
        "skywork_r1v2",
        "nemotron_cascade",
    }


def test_what_differs_between_the_stages_of_tempsamp():
    answer, think = load_stages(CONFIGS / "train/charades_sta_tempsamp_r1.yaml")
    assert [reward.name for reward in answer.config.rewards] == ["vision.temporal_iou"]
    assert [reward.name for reward in think.config.rewards] == ["vision.temporal_iou", "tag_format"]
    assert "reasoning" not in answer.config.data.options and think.config.data.options["reasoning"] == 0.5
    assert answer.config.num_train_epochs == think.config.num_train_epochs == 1.0
    lengths = [stage.config.rollout.engine[0].options["max_completion_length"] for stage in (answer, think)]
    assert lengths == [64, 512]
    assert all(stage.config.rollout.engine[1].name == "with_demos" for stage in (answer, think))


def test_what_differs_between_the_stages_of_urpa():
    source, target = load_stages(CONFIGS / "train/charades_to_unlabelled_urpa.yaml")
    assert source.config.rewards[0].options["relax"] == 0.1 and source.config.until is None
    assert [reward.name for reward in target.config.rewards][0] == "vision.consensus_span"
    assert target.config.until and target.config.until.options["of"] == "rewards/span_confidence/mean"
    assert not source.config.data.options["unlabelled"] and target.config.data.options["unlabelled"]


def test_what_differs_between_the_stages_of_skywork_and_what_is_watched():
    mpo, grpo = load_stages(CONFIGS / "train/skywork_r1v2.yaml")
    assert (mpo.config.objective.name, grpo.config.objective.name) == ("comparison", "policy_gradient")
    assert [engine.name for engine in grpo.config.rollout.engine] == ["vision.generate", "with_replay"]
    assert not grpo.config.references and "penalty" not in grpo.config.objective.options
    for stage in (mpo, grpo):
        assert stage.config.evaluation.data and stage.config.evaluation.data.name == "vision.pope"
        assert "reward_hacking" in [piece.name for piece in stage.config.report.checks]


def test_the_domains_of_the_cascade_have_their_own_settings():
    stages = {stage.name: stage.config for stage in load_stages(CONFIGS / "train/nemotron_cascade.yaml")}
    temperatures = [config.rollout.engine[0].options.get("temperature", 1.0) for config in stages.values()]
    assert temperatures == [0.6, 0.6, 1.0, 1.0, 1.0]
    dropped = ["drop_truncated" in [piece.name for piece in config.advantage] for config in stages.values()]
    assert dropped == [False, False, True, False, False]
    assert not any(config.carry for config in stages.values()), "the optimizer is new in every stage"


def on_toys(stage, folder):
    """Put the look-up table and its engine in the place of a stage's model, with two steps."""
    raw = as_plain(stage.config)

    def toy(reward):
        reward = {"name": reward} if isinstance(reward, str) else reward
        label = reward.get("label") or reward["name"].split(".")[-1]  # what the chain and `until` read
        return {"name": "tests.support.toys:share_right", "label": label, "weight": reward.get("weight", 1.0)}

    def frozen(piece):
        return "frozen" if "model" in piece else piece  # the start of the toy stands for a teacher on disk

    raw |= {
        "policy": "tests.support.toys:ToyRecalling",
        "data": {"name": "tests.support.toys:prompts", "answers": 2},
        "evaluation": {},
        "eval_steps": 0,
        "eval_on_start": False,
        "report": {"trackers": [], "log_completions": False},
        "max_steps": 2,
        "num_train_epochs": 0.0,
        "output_dir": str(folder / stage.folder.name),
        "init_from": str(folder / "somewhere") if stage.begins is not None else "",
    }
    raw["rewards"] = [toy(reward) for reward in raw["rewards"]]
    raw["references"] = {name: frozen(piece) for name, piece in raw["references"].items()}
    sampled = "vision.generate" in stage.config.rollout.engine[0].name
    engine = "tests.support.toys:ToyNoting" if sampled else "offline"
    raw["rollout"] |= {"num_prompts": 4, "engine": [engine, *raw["rollout"]["engine"][1:]]}
    return replace(stage, config=parse(raw, Config))


@pytest.mark.slow
@pytest.mark.parametrize("path", STAGED, ids=lambda path: path.stem)
def test_the_stages_train_one_after_another_on_a_toy(path, tmp_path, monkeypatch):
    monkeypatch.setattr(html.pages, "curves", lambda runs: [])
    stages = [on_toys(stage, tmp_path / "run") for stage in load_stages(path)]
    check_stage_folders(stages)
    train_stages(stages, lambda config: build(config, quiet=True), quiet=True)
    records = read_stages(tmp_path / "run")
    assert [record.step for record in records] == [2] * len(stages)
