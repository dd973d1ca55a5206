"""A training run on conversations as one row each, and as a row per turn, is the same run."""

from __future__ import annotations

import pytest
import torch

from mmrl.training.loop import train
from tests.support.toys import toy_run

SUPPORT = "tests.support.toys"
CHAINS = [
    ["total", "group_normalize"],
    ["total", "gigpo"],
    ["total", {"name": "returns", "by": ["role"]}, {"name": "group_center", "by": ["group", "role"]}],
    [{"name": "per_episode", "advantage": ["total", "group_normalize"]}, "shared_steps", "per_step"],
]


def trained(folder, chain, rows, **changes):
    run = toy_run(
        folder,
        policy={"name": f"{SUPPORT}:ToyTurnText", "double": True},
        rollout={"engine": [{"name": f"{SUPPORT}:ToyTurnRows", "rows": rows}], "max_rounds": 2},
        group_filter="varied",
        advantage=chain,
        objective={"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
        metrics=[{"name": "turns"}],
        max_steps=2,
        **changes,
    )
    train(run)
    return run.policy.table.detach(), run.journal.read()


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("at", ["last", "every"])
def test_both_forms_train_the_same_policy(chain, at, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    rewards = [{"name": f"{SUPPORT}:share_right", "at": at}]
    whole, steps = trained(tmp_path / "whole", chain, False, rewards=rewards)
    parts, others = trained(tmp_path / "parts", chain, True, rewards=rewards)
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    for one, other in zip(steps, others, strict=True):
        timed = {name for name in one if "time" in name or "per_second" in name}
        for name in (
            "reward",
            "reward_std",
            "frac_reward_zero_std",
            "completions/mean_length",
            "turns",
            "loss",
        ):
            assert one.get(name) == pytest.approx(other.get(name), abs=1e-6), name
        assert one.keys() - timed == other.keys() - timed
