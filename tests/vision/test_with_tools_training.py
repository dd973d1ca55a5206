"""Runs with tools: a stop in the middle changes nothing, and the report shows conversations, escaped."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from pyarrow import parquet

from mmrl.build import build, load_engine
from mmrl.config.schema import Config, parse
from mmrl.training.loop import train
from mmrl.vision.tools.replies import ToolFault
from tests.runtime.test_real_processes import SPEAKING, TALKING
from tests.vision.talking import BROKEN

QWEN = "qwen2_5_vl"


@pytest.fixture
def trained(checkpoint, tmp_path):
    def go(name, **changes):
        policy = {"name": "vision.tokens", "model": str(checkpoint(QWEN)), "dtype": "float32"}
        plan = {**SPEAKING, **TALKING, "policy": policy, "output_dir": str(tmp_path / name), **changes}
        run = build(parse(plan, Config), quiet=True)
        train(run)
        return run

    return go


def broken(on_error):
    """Write down a run whose tools hang, raise, and return garbage and an image of 40,000 pixels."""
    limits = {"hangs": 0.05}
    tools = [
        {"name": f"tests.vision.talking:{name}", "timeout": limits.get(name, 60), "on_error": on_error}
        for name in BROKEN
    ]
    generate, engine = TALKING["rollout"]["engine"]
    wrapped = {**engine, "name": "tests.vision.talking:Broken", "tool": tools}
    return {"rollout": {**TALKING["rollout"], "engine": [generate, wrapped]}, "max_steps": 1}


@pytest.mark.parametrize(("on_error", "finish"), [("tell", "turns"), ("skip", "tool_error")])
def test_a_run_goes_on_with_tools_that_fail_and_its_rows_say_so(trained, on_error, finish):
    run = trained(on_error, **broken(on_error))
    (path,) = (run.folder / "completions").glob("*.parquet")
    table = parquet.read_table(path).to_pydict()
    assert finish in table["finish"] and set(table["finish"]) <= {finish, "length"}
    told = "".join(table["conversation"])
    replies = told.count("<tool_response>")
    assert told.count("<tool_response>\nError: ") == replies and bool(replies) == (on_error == "tell")
    known = ("RuntimeError: no index", "no answer within 0.05 s", "returned object", "cannot be shown")
    assert sum(message in told for message in known) >= (2 if replies else 0)
    (record,) = [record for record in run.journal.read() if "tools/turns" in record]
    assert record["tools/errors"] == record["tools/calls"] > 0


def test_a_run_stops_at_a_tool_that_fails_where_it_should(trained):
    with pytest.raises(ToolFault, match="the tool '(raises|hangs|garbage|wide)' failed for prompt '"):
        trained("raised", **broken("raise"))


def test_a_run_with_tools_is_resumed_bit_for_bit(trained):
    whole = trained("whole", max_steps=2)
    trained("half", max_steps=1)
    again = trained("half", max_steps=2)
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


@pytest.mark.slow
def test_a_run_whose_older_images_leave_is_resumed_bit_for_bit_and_counts_conversations(trained):
    generate, engine = TALKING["rollout"]["engine"]
    engine = {**engine, "only_n_most_recent_images": 1, "turn_outcomes": True}
    changes = {"rollout": {**TALKING["rollout"], "engine": [generate, engine]}, "max_steps": 2}
    changes |= {"advantage": ["total", "gigpo"]}
    whole = trained("recent", **changes)
    trained("half recent", **{**changes, "max_steps": 1})
    again = trained("half recent", **changes)
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    paths = sorted((whole.folder / "completions").glob("*.parquet"))
    tables = [parquet.read_table(path).to_pydict() for path in paths]
    assert any(len(table["finish"]) > 6 for table in tables), "some conversations are several rows"
    for table in tables:
        assert sum(finish != "call" for finish in table["finish"]) == 6
        assert all(text.count("<image: ") <= 1 for text in table["conversation"])
    assert any("[image omitted]" in text for table in tables for text in table["conversation"])
    assert (whole.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_run_with_drafts_is_resumed_bit_for_bit_and_answers_from_drafts(trained):
    generate = TALKING["rollout"]["engine"][0]
    drafts = {"name": "vision.with_drafts", "rounds": [2], "learn": ["draft", "refine"], "shared": False}
    changes = {"rollout": {**TALKING["rollout"], "engine": [generate, drafts]}, "max_steps": 2}
    whole = trained("drafted", **changes)
    trained("half drafted", **{**changes, "max_steps": 1})
    again = trained("half drafted", **changes)
    for one, other in zip(whole.policy.module.parameters(), again.policy.module.parameters(), strict=True):
        assert torch.equal(one, other)
    answer = load_engine(str(whole.folder)).answer("what", images=[Image.new("RGB", (56, 56))])
    assert isinstance(answer, str)
