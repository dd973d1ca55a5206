"""Shared code of the claims benchmarks: paired gains, stored runs and the table."""

from __future__ import annotations

import json

from benchmarks.claims import common
from benchmarks.claims.table import table


def run(seed, *values):
    return {"seed": seed, "answers": {"mIoU": dict(zip("abcd", values, strict=True))}, "seconds": 2.0}


def test_a_gain_is_paired_by_seed_and_prompt():
    base = [run(0, 0.0, 0.2, 0.4, 0.6), run(1, 0.1, 0.3, 0.5, 0.7)]
    better = [run(0, 0.1, 0.3, 0.5, 0.7), run(1, 0.2, 0.4, 0.6, 0.8)]
    row = common.row("better", better, base, "mIoU")
    assert row["mean"] == 0.45 and row["by_seed"] == [0.4, 0.5]
    assert row["gain"] == (0.1, 0.1, 0.1)  # every pair differs by 0.1, whatever is drawn
    assert common.outcome(row["gain"]) == "appears"
    assert common.outcome((0.1, -0.1, 0.3)) == "does not appear"
    assert common.outcome((-0.1, -0.2, -0.1)) == "the opposite appears"


def test_a_finished_run_is_read_again(tmp_path):
    path = tmp_path / "new" / "run.json"
    first = common.once(path, lambda: {"seed": 3})
    assert first["seed"] == 3 and first["seconds"] >= 0
    assert common.once(path, lambda: 1 / 0) == first


def test_results_become_one_table(tmp_path):
    given = common.options("some", "Headline.", ["--output", str(tmp_path / "claims_some.json")])
    claim = common.Claim(method="SOME", baseline="GRPO", claim="c", situation="s", measure="m")
    base, better = [run(0, 0.0, 0.0, 0.0, 0.0)], [run(0, 0.5, 0.5, 0.5, 0.5)]
    rows = [common.row("GRPO", base, base, "mIoU"), common.row("SOME", better, base, "mIoU")]
    common.leave(given, claim, 0.1, rows, "appears: it does", [*base, *better])
    found = json.loads((tmp_path / "claims_some.json").read_text())
    assert found["seconds"] == 4.0 and found["command"] == "python -m benchmarks.claims.some"
    assert table(tmp_path).splitlines()[2:] == [
        "| SOME | GRPO | mIoU | 0.000 | 0.000 |  | appears |",
        "|  | SOME | mIoU | 0.500 | 0.500 | +0.500 (+0.500 to +0.500) |  |",
    ]
