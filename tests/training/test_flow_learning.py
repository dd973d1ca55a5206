"""Methods for flow models as they are shipped move the points of a toy flow towards their spots."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mmrl.build import build
from mmrl.config.loading import read
from mmrl.training.loop import train
from tests import test_configs
from tests.support.configs import method_file
from tests.support.toy_flow import ToyDenoise, nearness, spots
from tests.test_configs import on_a_toy

no_page = test_configs.no_page


def distance(run: Any) -> float:
    """Measure how far the points that a policy draws are from the spots, squared."""
    run.stream.step = 10**6  # draws of its own
    asked = [prompt for prompt in spots() for _ in range(64)]
    rows = ToyDenoise(run.policy, stream=run.stream).rollout(asked)
    return -sum(nearness(asked, [row.outcomes[-1] for row in rows])) / len(rows)


def trained(name: str, folder: Path, **changes: Any) -> Any:
    """Train the toy with a variant, in fewer and smaller collections than the paper's."""
    config = on_a_toy(read(method_file(name)), folder, max_steps=20, save_steps=1000, **changes)
    run = build(config, quiet=True)
    run.before = distance(run)
    train(run)
    return run


ONLINE = (
    *("flow_grpo", "grpo_guard", "tp_grpo", "awm", "diffusion_nft"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("dance_grpo", "dense_grpo", "vgpo", "dgpo")),
)


@pytest.mark.parametrize("name", ONLINE)
def test_a_method_moves_points_to_their_spots(name, tmp_path, no_page):
    small = {"rollout": {"num_generations": 8}, "learn": {"learning_rate": 0.1}}
    run = trained(name, tmp_path / "run", **small)
    assert run.before == pytest.approx(1.379, abs=1e-3)
    assert distance(run) < 0.6 * run.before


@pytest.mark.parametrize("name", ["diffusion_dpo", "dense_dpo", "gdro"])
def test_recorded_points_are_set_in_order(name, tmp_path, no_page):
    steps = trained(name, tmp_path / "run").journal.read()
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-6), "the policy begins as its reference"
    assert steps[-1]["rewards/accuracies"] == 1
    assert steps[-1]["rewards/margins"] > 0.05
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_dpo_prefers_the_right_answer_of_a_pair(tmp_path, no_page):
    config = on_a_toy(read(method_file("dpo")), tmp_path / "run", max_steps=10)
    run = build(config, quiet=True)
    train(run)
    steps = run.journal.read()
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss"] < 0.6
    assert steps[-1]["rewards/chosen"] > 0 > steps[-1]["rewards/rejected"]
