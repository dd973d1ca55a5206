"""Every sampler with a memory goes on exactly: killed and resumed, and on two processes as on one."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.registry import pieces
from mmrl.config.schema import Config, as_piece, parse
from mmrl.reporting import html
from mmrl.runtime import checkpoint
from mmrl.training.loop import train
from tests.support.distributed_worker import launch
from tests.support.resuming import assert_alike, killed, resumed
from tests.support.toys import plan

HERE = "tests.support.observing"
RISING = {"name": "linear", "start": 0.0, "end": 1.0, "steps": 5}
SHARE = {"of": "share_right"}
SAMPLERS = {
    "vade": [{"name": "vade", **SHARE}],
    "variance_aware": [{"name": "variance_aware", "update_steps": 2, **SHARE}],
    "variance_aware, full passes": [
        {
            "name": "variance_aware",
            "refresh": "full",
            "update_steps": 3,
            "diversity": "edit_distance",
            **SHARE,
        }
    ],
    "source_bandit": [{"name": "source_bandit", "by": "source", "window": 7}],
    "learning_velocity": [{"name": "learning_velocity", "by": "source", "open_at": 0.15, **SHARE}],
    "pools": [
        {"name": "pools", "by": "source", "pools": ["even", "odd"], "earlier": 0.4, "stage": RISING},
    ],
    "allocate": [{"name": "vade", **SHARE}, {"name": "allocate", "at_most": 5, **SHARE}],
    "allocate, xrpo": ["uniform", {"name": "allocate", "rule": "xrpo", **SHARE}],
    "triage": [{"name": "triage", "weights": {"neutral": 1, "severe": 3}}],
    "selected_by_difficulty": [{"name": "selected_by_difficulty", "by": "difficulty", "num_selected": 6}],
    "hints": [{"name": "uniform"}, {"name": "with_hints", "hint_column": "hints", "threshold": 0.2, **SHARE}],
    "hints, next time": [
        {"name": "uniform"},
        {"name": "with_hints", "hint_column": "hints", "when": "next_time", "threshold": 0.2, **SHARE},
    ],
    "hints by difficulty": [
        {"name": "uniform"},
        {"name": "with_difficulty_hints", "hint_column": "solution", "max_hint": 1.0, **SHARE},
    ],
    "experience": [
        {"name": "uniform"},
        {"name": "with_experience", "experience_update": "contrast", "max_experiences": 7, **SHARE},
    ],
}
WITHOUT = ("selected_by_difficulty", "triage")  # of a memory that would change their draws
TOGETHER = [name for name in SAMPLERS if name != "experience"]  # which compares answers of one process
TOLD = (
    "sampler/entropy",
    "sampler/rollouts_max",
    "hints/share",
    "hints/prompts",
    "experiences",
)  # what a memory changes
# Without evaluations, whose bootstrap takes most of the time of so small a run.
QUICK = {"evaluation": {}, "eval_steps": 0, "eval_on_start": False}
USUAL = {"data": f"{HERE}:sourced", "rollout": {"engine": [f"{HERE}:ToyTokens"]}}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(html, "curves", lambda runs: [])


def test_every_sampler_is_here():
    listed = {as_piece(piece, "").name for chain in SAMPLERS.values() for piece in chain}
    elsewhere = {"vision.difficulty_augmentation"}  # tests/vision and tests/runtime/test_distributed.py
    assert {entry.full_name for entry in pieces("sampler")} <= listed | elsewhere


def changes(name):
    rollout = {"num_prompts": 3, "num_generations": 3, "max_rounds": 2, "policy": "slow"}
    if name.startswith("hints"):
        usual = {"data": "tests.support.toys:hinted_prompts", "group_filter": {"name": "varied", **SHARE}}
        return {**QUICK, **usual, "rollout": rollout, "sampler": SAMPLERS[name]}
    return {**QUICK, **USUAL, "rollout": {**rollout, **USUAL["rollout"]}, "sampler": SAMPLERS[name]}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_killed_run_goes_on_exactly(name, tmp_path):
    whole = resumed(tmp_path / "whole", **changes(name))
    killed(tmp_path / "killed", at=4, **changes(name))
    assert_alike(resumed(tmp_path / "killed", **changes(name)), whole)
    asked = [str([record.get(told) for told in TOLD]) for record in whole.journal.read()]
    assert len(set(asked)) > 1 or name in WITHOUT, "it learned something that could have been lost"


def plan_of(name, folder):
    learn = {"optimizer": "sgd", "learning_rate": 0.5, "micro_batch_steps": 9}
    usual = {
        "policy": {"name": "tests.support.toys:ToyText", "double": True},
        "group_filter": "varied",
        "objective": {"aggregation": "step_mean"},
        "max_steps": 4,
        "learn": learn,
    }
    return plan(folder, **{**usual, **changes(name), "rollout": {**changes(name)["rollout"], "policy": ""}})


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch([plan_of(name, folder / str(i)) for i, name in enumerate(TOGETHER)], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_choose_as_one(name, two_processes, tmp_path):
    run = build(parse(plan_of(name, tmp_path), Config), quiet=True)
    train(run)
    there = two_processes / str(TOGETHER.index(name))
    last = checkpoint.checkpoints(there)[0]
    here = checkpoint.checkpoints(run.folder)[0]
    states = [checkpoint.read_state(folder)["pieces"] for folder in (last, here)]
    for place in [place for place in states[1] if place.startswith("sampler")]:
        assert str(states[0][place]) == str(states[1][place])
    weights = load_file(there / "weights-1" / "model.safetensors")["table"]
    assert (weights - run.policy.table.data).abs().max() < 1e-12
