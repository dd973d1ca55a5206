"""Every sampler with a memory goes on exactly: killed and resumed, and on two processes as on one."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.runtime import checkpoint
from mmrl.training.loop import train
from tests.support.distributed_worker import launch
from tests.support.killing import left_out
from tests.support.remembering import MOSTLY, SAMPLERS, of_sampler
from tests.support.resuming import assert_alike, killed, resumed
from tests.support.toys import plan

pytestmark = pytest.mark.usefixtures("no_page")

WITHOUT = (
    "group_by_length",
    "selected_by_difficulty",
    "triage",
    "wordings",
)  # of a memory that would change their draws
TOLD = (
    "sampler/unfinished",
    "sampler/entropy",
    "sampler/rollouts_max",
    "hints/share",
    "hints/prompts",
    "experiences",
    "reflection/prompts",
    "examples/prompts",
    "examples/solved",
)  # what a memory changes


def test_every_sampler_is_here():
    assert not left_out()


@pytest.mark.parametrize(
    "name", [name if name in MOSTLY else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS]
)
def test_a_killed_run_goes_on_exactly(name, tmp_path):
    changes = {**of_sampler(name), "max_steps": 5}
    whole = resumed(tmp_path / "whole", **changes)
    killed(tmp_path / "killed", at=4, **changes)
    assert_alike(resumed(tmp_path / "killed", **changes), whole)
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
    return plan(folder, **{**usual, **of_sampler(name, policy="")})


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch([plan_of(name, folder / str(i)) for i, name in enumerate(SAMPLERS)], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_two_processes_choose_as_one(name, two_processes, tmp_path):
    run = build(parse(plan_of(name, tmp_path), Config), quiet=True)
    train(run)
    there = two_processes / str(list(SAMPLERS).index(name))
    last = checkpoint.checkpoints(there)[0]
    here = checkpoint.checkpoints(run.folder)[0]
    states = [checkpoint.read_state(folder)["pieces"] for folder in (last, here)]
    for place in [place for place in states[1] if place.startswith("sampler")]:
        assert str(states[0][place]) == str(states[1][place])
    weights = load_file(there / "weights-1" / "model.safetensors")["table"]
    assert (weights - run.policy.table.data).abs().max() < 1e-12
