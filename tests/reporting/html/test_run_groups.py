"""Pages of several runs: groups over seeds, paired differences, origin and cost, and figures as files."""

from __future__ import annotations

import csv
import json
from xml.etree import ElementTree

import pytest

from mmrl.cli import main
from mmrl.config.schema import ConfigError
from mmrl.reporting.answers import step_file, write_columns
from mmrl.reporting.html.exports import export_figures
from mmrl.reporting.html.pages import comparison, named
from mmrl.reporting.html.run_folder import find_run
from mmrl.reporting.html.run_groups import RunGroup, cost_rows, group_runs, paired_rows
from mmrl.runtime.folders import mark
from tests.reporting.html.test_run_page import Tags, outside

EVIL = "<script>alert(1)<b>$x^{_"


def write_run(home, name, rewards, *, seed=0, rate=0.1, right=None, joules=None, unmetered=(), uids="abc"):
    """Write the folder of a run with one reward a step, and answers to three prompts if `right` is given."""
    folder = home / name
    folder.mkdir()
    (folder / "config.yaml").write_text(
        json.dumps(
            {"policy": "toy", "learn": {"learning_rate": rate}, "seed": seed, "output_dir": str(folder)}
        )
    )
    energy = {"energy/gpu_joules": joules} if joules else {}
    lines = [
        {"step": i, "reward": reward, "step_time": 2.0, **energy, **({"eval_right": reward} if i else {})}
        for i, reward in enumerate(rewards)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = {"commit": "abc123def4567890", "devices": ["a GPU"], "unmetered": list(unmetered)}
    mark(folder, "train", versions=["torch 2.0", f"peft {seed}"], machine=machine)
    if right is not None:
        asked = {"prompt": ["x", "y", "z"], "target": ["1"] * 3, "media": ["[]"] * 3}
        rows = {"uid": list(uids), **asked, "reward/right": right}
        path = step_file(folder, len(rewards))
        path.parent.mkdir()
        write_columns(path, {**rows, "reward": right})
    return folder


@pytest.fixture
def home(tmp_path):
    write_run(tmp_path, "base-seed0", [0.0, 0.2], seed=0, right=[0.0, 0.0, 1.0], joules=50.0)
    write_run(tmp_path, "base-seed1", [0.2, 0.4], seed=1, right=[0.0, 0.5, 1.0], joules=50.0)
    write_run(tmp_path, "fast", [0.1, 0.8], rate=0.5, right=[1.0, 1.0, 1.0], unmetered=["cpu: no counters"])
    return tmp_path


def read(home, *names):
    return named([find_run(home / name) for name in names])


def test_runs_that_differ_in_their_seed_are_one_group(home):
    groups = group_runs(read(home, "base-seed0", "base-seed1", "fast"))
    assert list(groups) == ["base (2 runs)", "fast"]
    base = groups["base (2 runs)"]
    assert isinstance(base, RunGroup)
    first, last = base.records
    assert (first["reward"], first["reward/low"], first["reward/high"]) == (pytest.approx(0.1), 0.0, 0.2)
    assert (last["eval_right"], last["step"]) == (pytest.approx(0.3), 1)
    assert base.metrics == {"right": pytest.approx(0.3)} and base.intervals == {"right": (0.2, 0.4)}
    assert base.ends("reward") == (pytest.approx(0.1), pytest.approx(0.3)) and base.seconds == 8.0


def test_runs_are_grouped_by_named_settings(home):
    runs = read(home, "base-seed0", "base-seed1", "fast")
    assert list(group_runs(runs, ["seed"])) == ["seed=0 (2 runs)", "seed=1"]
    assert list(group_runs(runs, ["learn.learning_rate"])) == [
        "learning_rate=0.1 (2 runs)",
        "learning_rate=0.5",
    ]
    with pytest.raises(ConfigError, match="did you mean 'learn.learning_rate'"):
        group_runs(runs, ["learn.learning_rat"])


def test_differences_are_paired_by_prompt(home):
    groups = group_runs(read(home, "base-seed0", "base-seed1", "fast"))
    ((measure, group, text, prompts, sizes),), notes = paired_rows({k: v for k, v in groups.items()})
    # Means of base: 0, 0.25 and 1; of fast 1, 1, 1: differences 1, 0.75 and 0, on average 0.583.
    assert (measure, group, prompts, sizes) == ("right", "fast", "3", "1 and 2")
    assert text.startswith("+0.583 (") and notes == []


def test_prompts_without_a_common_uid_are_paired_by_their_content(home):
    write_run(home, "renamed", [0.5], rate=0.9, right=[1.0, 0.5, 0.0], uids="pqr")
    ((_, _, text, prompts, _),), notes = paired_rows(group_runs(read(home, "base-seed0", "renamed")))
    # 1 - 0, 0.5 - 0 and 0 - 1: on average 1/6.
    assert prompts == "3" and text.startswith("+0.167 (") and notes == []
    write_run(home, "partly", [0.5], rate=0.7, right=[1.0, 0.5, 0.0], uids="aqr")
    ((_, _, _, prompts, _),), notes = paired_rows(group_runs(read(home, "base-seed0", "partly")))
    assert prompts == "1" and notes == []


def test_a_run_without_an_evaluation_is_named(home):
    write_run(home, "bare", [0.5], rate=0.9)
    runs = read(home, "fast", "bare")
    rows, notes = paired_rows(group_runs(runs))
    assert rows == [] and notes == ["bare stored no answers of an evaluation"]
    text = comparison(list(runs.values()))
    assert "Without an evaluation: bare." in text and "bare stored no answers" in text


def test_origin_and_cost_are_listed(home):
    titles, rows, notes = cost_rows(read(home, "base-seed0", "base-seed1", "fast"))
    cells = [dict(zip(titles, row, strict=True)) for row in rows]
    assert cells[0]["joules"] == "gpu 100" and cells[2]["joules"] == "not measured"
    assert cells[0]["commit"] == "abc123def456" and cells[0]["seconds"] == "4.00"
    assert [cell["other packages"] for cell in cells] == ["peft 0", "peft 1", "peft 0"]
    assert notes == ["packages of all runs: torch 2.0", "energy is not measured of cpu: no counters"]


def test_the_command_writes_one_page_and_figures(home, capsys):
    write_run(home, EVIL, [0.3, 0.9], rate=0.7, right=[1.0, 0.0, 0.0])
    names = ["base-seed0", "base-seed1", "fast", EVIL]
    page = home / "out" / "report.html"
    assert main(["report", *(str(home / name) for name in names), "--output", str(page)]) == 0
    text = page.read_text()
    tags = Tags(text)
    assert outside(text) == [] and tags.wrong == [] and tags.open == []
    assert "4 runs side by side" in text and EVIL not in text and "alert(1)&lt;" in text.replace("<wbr>", "")
    assert "mean and range of base-seed0, base-seed1" in text and "Paired differences" in text
    figures = home / "out" / "report_figures"
    assert {path.name for path in figures.iterdir()} == {
        f"{n}.{e}" for n in ("reward", "eval_right") for e in ("svg", "csv")
    }
    root = ElementTree.parse(figures / "reward.svg").getroot()
    assert root.tag.endswith("svg") and not any(element.tag.endswith("script") for element in root.iter())
    with (figures / "reward.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["run", "step", "value", "low", "high"]
    assert rows[1] == ["base (2 runs)", "1", "0.1", "0.0", "0.2"]
    assert [EVIL, "2", "0.9", "", ""] in rows
    assert main(["report", str(home / "fast"), "--group", "seed"]) == 2
    assert "--group needs several runs" in capsys.readouterr().err
    assert main(["report", str(home / "fast"), str(home / "fast" / ".." / "fast")]) == 2
    assert "the same run is named twice" in capsys.readouterr().err


def test_names_of_figures_are_safe_and_distinct(tmp_path):
    records = [{"step": i, "../a": float(i), "a?": float(i), "b": 1.0} for i in range(2)]
    written = export_figures({"run": records}, tmp_path / "figures")
    assert sorted(path.name for path in written) == ["a.svg", "a_.svg"]  # `b` does not vary
