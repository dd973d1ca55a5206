"""Runs whose conversations part at their turns: both methods learn, and are resumed bit for bit."""

from __future__ import annotations

import pytest
import torch

from mmrl.build import build
from mmrl.config.loading import merge, read
from mmrl.config.schema import Config, parse
from mmrl.training.loop import train
from tests.runtime.test_real_processes import SPEAKING
from tests.support.configs import method_file

TOOLS = ["vision.crop", "tests.vision.talking:ruled"]
LONGER = "tests.support.real_worker:longer"
# What a tiny model needs in place of a method's rewards, tools and lengths.
FITTED = {
    "slate": {"name": "tests.vision.parting:Stepwise", "reward": [{"name": LONGER, "at": "every"}]},
    "treecua_dpo": {"name": "tests.vision.parting:Branching", "branching": [2, 2]},
}


@pytest.fixture
def plan(checkpoint, tmp_path):
    def lay(method, name, **changes):
        raw = merge({k: v for k, v in SPEAKING.items() if k not in ("advantage", "objective", "rewards")}, {
            "policy": {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"},
            "output_dir": str(tmp_path / name), "max_steps": 2, "save_steps": 1,
        })  # fmt: skip
        raw = merge({**raw, "rewards": [LONGER]}, read(method_file(method)))
        generate = {"name": "vision.generate", "max_completion_length": 6}
        engine = [generate, {**FITTED[method], "tool": TOOLS}]
        rollout = {"engine": engine, "num_prompts": 2, "policy": ""}
        raw["references"] = {"ref": "frozen"}
        return merge(merge(raw, {"rollout": rollout}), changes)

    return lay


@pytest.mark.slow
@pytest.mark.parametrize("method", FITTED)
def test_a_run_learns_and_is_resumed_bit_for_bit(plan, method):
    runs = {}
    for name, steps in (("whole", 2), ("half", 1), ("half", 2)):
        runs[name] = run = build(parse(plan(method, name, max_steps=steps), Config), quiet=True)
        train(run)
    parameters = (run.policy.module.state_dict() for run in runs.values())
    for (name, one), (_, other) in zip(*(weights.items() for weights in parameters), strict=True):
        assert torch.equal(one, other), name
    records = [record for record in runs["whole"].journal.read() if "tools/turns" in record]
    assert len(records) == 2 and any(record["tools/calls"] > 0 for record in records)
    assert any(record["grad_norm"] > 0 for record in records)
