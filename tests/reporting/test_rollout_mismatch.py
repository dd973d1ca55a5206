"""What a cheaper engine costs and saves, as the report tells it."""

from __future__ import annotations

import json
import math

import pytest

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.diagnostics.context import lossy_pieces
from mmrl.reporting.rollout_mismatch import conclude, describe_mismatch, mismatch_rows
from mmrl.training.loop import train
from tests.support.toys import plan

HERE = __name__


def test_moments_of_weights_become_effective_shares():
    # Weights 1 and 3 of two answers of four: (1 + 3)^2 / (2 (1 + 9)) = .8; of steps half are known, and 1.
    moments = {"steps/0": 0.5, "steps/1": 0.5, "steps/2": 0.5, "rows/0": 0.5, "rows/1": 1.0, "rows/2": 2.5}
    found = conclude({"loss": 3.0, **{f"moments/{name}": value for name, value in moments.items()}})
    assert found == {
        "loss": 3.0,
        "sampling/ess/steps": 1.0,
        "sampling/ess/rows": 0.8,
        "sampling/importance_sampling_ratio/mean": 1.0,
    }
    assert conclude({"loss": 3.0}) == {"loss": 3.0}


RECORD = {
    "sampling/kl": 0.01,
    "sampling/sampling_logp_difference/mean": 0.05,
    "sampling/ess/rows": 0.75,
}


def test_the_gap_of_a_cheap_engine_is_told_in_a_line():
    assert describe_mismatch(RECORD, "cache few_bits") == (
        "rollouts on cache few_bits: log-probabilities differ by 0.05 on average, KL 0.01 nats a step, "
        "answers are worth 75% of as many exact ones"
    )
    assert describe_mismatch(RECORD, "") == describe_mismatch({"reward": 1.0}, "cache few_bits") == ""


def test_the_report_has_a_table_where_an_engine_differs():
    exact = {**RECORD, "sampling/kl": -1e-9}
    assert mismatch_rows([exact, exact]) == mismatch_rows([{"reward": 1.0}]) == mismatch_rows([]) == []
    timed = {"rollout/seconds": 0.5, "rollout/exact_seconds": 1.25, "rollout/speedup": 2.5}
    found = mismatch_rows([RECORD, {**RECORD, **timed, "sampling/kl": 0.03, "rollout/agreement": math.nan}])
    rows = {title: values for title, *values in found}
    assert rows["KL of engine to policy, nats a step"] == ["0.0100", "0.0200", "0.0300"]
    assert rows["times faster"] == ["2.50", "2.50", "2.50"]
    assert "answers the exact engine gives as well" not in rows
    assert "seconds on the exact engine" in [row[0] for row in mismatch_rows([{**exact, **timed}])]


def test_what_makes_engines_cheap_is_read_off_a_config(tmp_path):
    engine = {"name": "vision.generate", "cache": "compression.visual_quant"}
    engine["transform"] = ["compression.yopo25", {"name": "compression.fastv", "keep": 0.5}]
    config = parse(plan(tmp_path, rollout={"engine": [engine, "with_demos"]}), Config)
    names = ["transform compression.yopo25", "transform compression.fastv", "cache compression.visual_quant"]
    assert lossy_pieces(config) == names
    assert lossy_pieces(parse(plan(tmp_path), Config)) == []


class TellingToy:
    """Rollouts of a toy, and a number about them."""

    notes = frozenset()

    def __init__(self, engine, *, cache: str = ""):
        self.engine, self.policy, self.asked = engine, engine.policy, 0

    def rollout(self, prompts):
        self.asked += 1
        return self.engine.rollout(prompts)

    def pop_metrics(self):
        return {"rollout/asked": float(self.asked)}


def run_of(folder, **changes):
    engines = ["tests.support.toys:ToyGenerate", {"name": f"{HERE}:TellingToy", **changes}]
    config = parse(plan(folder, rollout={"engine": engines}), Config)
    return build(config)


def test_a_run_reports_the_gap_and_what_engines_tell(tmp_path, capsys):
    run = run_of(tmp_path / "run")
    train(run)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["rollout/asked"] for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record["sampling/ess/steps"] == pytest.approx(1.0)
        assert record["sampling/ess/rows"] == pytest.approx(1.0)
        assert record["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0)
        assert not any(name.startswith("moments/") or name == "cheap" for name in record)
    assert "rollouts on" not in capsys.readouterr().out
