"""Runs with tools: a stop in the middle changes nothing, and the report shows conversations, escaped."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from pyarrow import parquet

from mmrl.build import build, load_engine
from mmrl.config.schema import Config, parse
from mmrl.reporting import html
from mmrl.training.loop import train
from tests.runtime.test_real_processes import SPEAKING, TALKING

QWEN = "qwen2_5_vl"


@pytest.fixture
def trained(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(html, "curves", lambda runs: [])

    def go(name, **changes):
        policy = {"name": "vision.tokens", "model": str(checkpoint(QWEN)), "dtype": "float32"}
        plan = {**SPEAKING, **TALKING, "policy": policy, "output_dir": str(tmp_path / name), **changes}
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return run

    return go


def test_a_run_with_tools_is_resumed_bit_for_bit(trained):
    whole = trained("whole")
    trained("half", max_steps=2)
    again = trained("half")
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    records = [record for record in whole.journal.read() if "tools/turns" in record]
    assert records and all(record["tools/calls"] > 0 for record in records)
    assert all(1 < record["tools/turns"] <= 4 for record in records)
    (*_, path) = sorted((whole.folder / "completions").glob("*.parquet"))
    shown = parquet.read_table(path).column("conversation").to_pylist()
    assert any("<tool_response>" in text for text in shown)
    asked = Image.new("RGB", (56, 56))
    answers = [load_engine(str(whole.folder)).answer("what", images=[asked]) for _ in range(2)]
    assert isinstance(answers[0], str) and answers[0] == answers[1]
    page = (whole.folder / "report.html").read_text()
    assert "<tool_response>" not in page
