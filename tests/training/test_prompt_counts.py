"""Which prompts a run asked, how often and how hard they were: counted from reward tables, saved, resumed."""

from __future__ import annotations

import math

import pytest
from pyarrow import parquet

from mmrl.core.rng import Stream
from mmrl.reporting.prompts import TOTAL
from mmrl.runtime.checkpoint import read_state, write_state
from mmrl.samplers.uniform import Uniform
from mmrl.training.loop import train
from mmrl.training.prompt_counts import PromptCounts
from tests.support.tables import reward_table
from tests.support.toys import toy_run


class Hopeful(Uniform):
    """A sampler that believes something of a prompt."""

    def sampling_weights(self):
        return {"p1": {"success": 0.25}}


def counted():
    stream = Stream()
    counts = PromptCounts(stream)
    counts.observe((), reward_table([1.0, 0.0, 0.5, None], group=["a", "a", "b", "b"]))
    stream.step = 3
    counts.observe((), reward_table([0.5, 0.5, None], group=["b", "b", "c"]))
    return counts


def test_rounds_rollouts_and_mean_rewards_are_counted_by_prompt():
    columns = counted().columns()
    assert columns["uid"] == ["a", "b", "c"]
    assert columns["asked"] == [1, 2, 1]
    assert columns["rollouts"] == [2, 4, 1]
    assert columns["mean"][:2] == [0.5, pytest.approx(0.5)]  # b: (0.5 + 0.5 + 0.5) / 3, its None left out
    assert columns["first"][:2] == [0.5, 0.5] and columns["last"][:2] == [0.5, 0.5]
    assert math.isnan(columns["mean"][2]) and math.isnan(columns["last"][2])
    assert columns["step"] == [0, 3, 3]


def test_first_and_last_group_are_kept_apart():
    counts = PromptCounts(Stream())
    for value in (0.0, 1.0, 0.25):
        counts.observe((), reward_table([value, value], group=["a", "a"]))
    columns = counts.columns()
    assert (columns["first"], columns["last"]) == ([0.0], [0.25])
    assert columns["mean"] == [pytest.approx(1.25 / 3)]


def test_a_run_with_labels_only_counts_without_rewards():
    counts = PromptCounts(Stream())
    counts.observe((), reward_table([1.0], weights={"reward": 1.0}).replace(weights={}))
    assert counts.columns()["asked"] == [1] and math.isnan(counts.columns()["mean"][0])


def test_counts_go_through_a_checkpoint_unchanged(tmp_path):
    before, after = counted(), PromptCounts(Stream())
    write_state(tmp_path, before.state_dict())
    after.load_state_dict(read_state(tmp_path))
    assert repr(after.columns()) == repr(before.columns())  # NaN is not equal to itself


def test_counts_of_many_prompts_are_small(tmp_path):
    counts = PromptCounts(Stream())
    counts.observe((), reward_table([1.0] * 2000, group=[f"prompt-{i}" for i in range(2000)]))
    write_state(tmp_path, counts.state_dict())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000 * 80  # bytes a prompt


def test_a_run_writes_its_prompts_and_beliefs_at_checkpoints(tmp_path):
    run = toy_run(tmp_path, sampler=[f"{__name__}:Hopeful"], max_steps=3)
    train(run)
    written = parquet.read_table(tmp_path / "prompts.parquet")
    rows = {row["uid"]: row for row in written.to_pylist()}
    assert written.schema.metadata[TOTAL] == b"8"
    assert sum(row["asked"] for row in rows.values()) == 3 * 4 and len(rows) == 8
    assert sum(row["rollouts"] for row in rows.values()) == 3 * 4 * 4
    assert rows["p1"]["text"] == "say 2"
    beliefs = parquet.read_table(tmp_path / "beliefs.parquet").to_pylist()
    assert beliefs == [{"sampler": "sampler[0]", "about": "p1", "name": "success", "value": 0.25}]
    assert "What sampler[0] believes" in (tmp_path / "report.html").read_text()


def test_a_resumed_run_counts_as_one_that_never_stopped(tmp_path):
    for folder, stops in (("whole", (4,)), ("parts", (2, 4))):
        for steps in stops:
            train(toy_run(tmp_path / folder, max_steps=steps, save_steps=2))
    whole, parts = (parquet.read_table(tmp_path / name / "prompts.parquet") for name in ("whole", "parts"))
    assert whole.equals(parts)
