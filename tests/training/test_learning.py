"""Methods as they are shipped raise the reward of a toy policy, through `build` and `train`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome
from mmrl.training.loop import train
from tests import test_configs
from tests.support.configs import method_file
from tests.test_configs import on_a_toy

no_page = test_configs.no_page

LATER = ("reinforce_pp_baseline", "luspo", "asymre", "importance_sequence_mask")
METHODS = (
    *("grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "sapo", "gdpo", "tempsamp_r1"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in LATER),
)


@per_outcome
def all_right(prompt: Prompt, outcome: Outcome) -> float:
    """Give 1 for one answer only: the target, twice."""
    return float(outcome.text == f"{prompt.target} {prompt.target}")


def rewards_of(name: str, folder: Path, **changes: Any) -> list[float]:
    """Train a toy with a variant, and give the mean of its first reward in what it sampled at every step."""
    wanted = {
        "data": {"name": "tests.support.toys:prompts", "num": 4},
        "rollout": {"num_prompts": 4, "num_generations": 8},
        "max_steps": 25,
        "save_steps": 25,
    }
    config = on_a_toy(read(method_file(name)), folder, **merge(wanted, changes))
    run = build(config, quiet=True)
    train(run)
    return [step[f"rewards/{run.method.rewards[0].name}/mean"] for step in run.journal.read()]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_raises_the_reward(name, tmp_path, no_page):
    # Six tokens drawn at random, answers that may end at once: about an eighth of the tokens are right.
    reward = rewards_of(name, tmp_path / "run")
    assert reward[0] < 0.25
    assert sum(reward[-3:]) / 3 > 0.6


def test_the_80_20_rule_learns_from_few_steps_and_so_slower(tmp_path, no_page):
    reward = rewards_of("high_entropy", tmp_path / "run")
    assert reward[0] + 0.15 < sum(reward[-3:]) / 3


def test_demonstrations_teach_what_sampling_does_not_find(tmp_path, no_page):
    # One answer in 12 * 12 * 12 earns anything, and 40 * 4 * 8 are drawn.
    rare = {
        "max_steps": 40,
        "learn": {"on_no_learning": "warn"},
        "policy": {"name": "tests.support.toys:ToyText", "vocab": 12},
        "rewards": [{"name": "tests.training.test_learning:all_right", "label": "temporal_iou"}],
    }
    shown = rewards_of("tempsamp_r1", tmp_path / "shown", **rare)
    alone = rewards_of("grpo", tmp_path / "alone", **rare)
    assert max(alone) < 0.1
    assert shown[0] < 0.1 and sum(shown[-3:]) / 3 > 0.8


def test_supervised_learning_raises_the_probability_of_the_demonstrations(tmp_path, no_page):
    # Its loss is minus the mean log-probability of their tokens: log 6 at the beginning.
    config = on_a_toy(read(method_file("supervised")), tmp_path / "run", max_steps=25)
    run = build(config, quiet=True)
    train(run)
    losses = [step["loss"] for step in run.journal.read()]
    assert losses[0] == pytest.approx(math.log(6), abs=1e-5)
    assert losses[-1] < 0.3
