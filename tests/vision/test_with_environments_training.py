"""Runs with environments: a stop in the middle changes nothing, nor does the order of their answers."""

from __future__ import annotations

import pytest
import torch

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.training.loop import train
from tests.runtime.test_real_processes import PLAYING, SPEAKING
from tests.support.resuming import without_times


@pytest.fixture
def trained(checkpoint, tmp_path):
    def go(name, **changes):
        policy = {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"}
        plan = {**SPEAKING, **PLAYING, "policy": policy, "output_dir": str(tmp_path / name), **changes}
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return run

    return go


def test_a_run_with_environments_is_resumed_bit_for_bit(trained):
    whole = trained("whole", max_steps=2)
    trained("half", max_steps=1)
    again = trained("half", max_steps=2)
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    assert str(without_times(whole.journal.read())) == str(without_times(again.journal.read()))
    records = [record for record in whole.journal.read() if "tools/turns" in record]
    assert records and any(record["tools/calls"] > 0 for record in records)
