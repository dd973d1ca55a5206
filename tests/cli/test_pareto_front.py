"""The front of checkpoints: what is on it, what is marked, and what is said where nothing was evaluated."""

from __future__ import annotations

import json

from mmrl.cli import main


def run_of(folder, *points):
    folder.mkdir()
    records = [
        {"step": i, "loss": 0.1, **({"eval_a": a, "eval_b": b} if a is not None else {})}
        for i, (a, b) in enumerate(points)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_the_front_of_two_runs_is_printed_with_its_measures(tmp_path, capsys):
    one = run_of(tmp_path / "one", (1, 4), (None, None), (0.5, 0.5))
    two = run_of(tmp_path / "two", (2, 3), (4, 1), (3, 0.5))
    wanted = ["--metrics", "eval_a", "eval_b", "--reference", "0", "0", "--select", "2"]
    assert main(["pareto-front", one, two, *wanted]) == 0
    said = capsys.readouterr().out
    assert "one step 1 *" in said and "two step 2 *" in said and "two step 1" in said
    assert "two step 1 *" not in said and "step 3" not in said
    assert "3 of 5 evaluations" in said and "hypervolume 9\n" in said
    assert "3.6" in said, "the threshold of 4"


def test_a_metric_that_no_evaluation_has_is_named(tmp_path, capsys):
    run = run_of(tmp_path / "one", (1, 4))
    assert main(["pareto-front", run, "--metrics", "eval_a", "eval_c"]) == 2
    assert "has no record with eval_a, eval_c; did you mean" in capsys.readouterr().err
    assert main(["pareto-front", run, "--metrics", "eval_a", "--reference", "1", "2"]) == 2
    assert main(["pareto-front", str(tmp_path / "no"), "--metrics", "eval_a"]) == 2
