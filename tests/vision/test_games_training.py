"""Runs of games: a stop in the middle changes nothing, and frozen roles and limits work on real models."""

from __future__ import annotations

import pytest
import torch
from pyarrow import parquet

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.training.loop import train
from tests.runtime.test_real_processes import GAMING, SPEAKING


@pytest.fixture
def trained(checkpoint, tmp_path):
    def go(name, **changes):
        policy = {"name": "vision.tokens", "model": str(checkpoint("qwen2_5_vl")), "dtype": "float32"}
        plan = {**SPEAKING, **GAMING, "policy": policy, "output_dir": str(tmp_path / name), **changes}
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return run

    return go


@pytest.mark.slow
def test_a_run_of_games_is_resumed_bit_for_bit(trained):
    whole = trained("whole")
    trained("half", max_steps=2)
    again = trained("half")
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    records = [record for record in whole.journal.read() if "game/turns" in record]
    assert len({record["game/turns"] for record in records}) > 1
    assert all(record["game/share_of_turns/guesser"] == 0.5 for record in records)
    (*_, path) = sorted((whole.folder / "completions").glob("*.parquet"))
    read = parquet.read_table(path).column("read").to_pylist()
    assert any(text.startswith("heard: ") for text in read)


def test_the_frozen_policy_is_that_of_the_beginning(trained):
    engine = {**GAMING["rollout"]["engine"][1], "frozen": ["speaker"]}
    rollout = {**GAMING["rollout"], "engine": [GAMING["rollout"]["engine"][0], engine]}
    run = trained("frozen", rollout=rollout)
    before = run.method.engine.opponent.policy.module
    pairs = list(zip(run.policy.module.parameters(), before.parameters(), strict=True))
    assert any(not torch.equal(one, other) for one, other in pairs)
    assert not any(other.requires_grad for _, other in pairs)
    (*_, path) = sorted((run.folder / "completions").glob("*.parquet"))
    assert all(text.startswith("heard: ") for text in parquet.read_table(path).column("read").to_pylist())
