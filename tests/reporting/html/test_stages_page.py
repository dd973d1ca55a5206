"""The page of a run in stages, and the commands that find a stage in its folder."""

from __future__ import annotations

import re

import pytest

from mmrl.cli import main
from mmrl.cli.watch import Page
from mmrl.config.loading import ConfigError
from mmrl.inference.sources import resolve
from mmrl.reporting.html.pages import steps_in_sequence
from mmrl.reporting.html.run_folder import find_run
from mmrl.runtime.stages import read_stages, write_stages
from tests.support.staging import trained


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "staged"
    trained(folder, stages=[{"name": "source", "max_steps": 3}, {"name": "target", "max_steps": 2}])
    return folder


def test_one_page_has_the_stages_side_by_side(home):
    page = (home / "report.html").read_text()
    assert "<h1>staged: 2 stages</h1>" in page
    links = re.findall(r'<a href="([^"#]*)">', page)
    assert links == ["1-source/report.html", "2-target/report.html"]
    assert all((home / link).is_file() for link in links)
    assert "max_steps" in page.partition('id="differences"')[2]


def test_the_steps_of_a_stage_are_counted_on():
    class Run:
        def __init__(self, steps):
            self.records, self.done = [{"step": step, "reward": 0.0} for step in range(steps)], steps

    counted = steps_in_sequence({"a": Run(3), "b": Run(2)})
    assert [[record["step"] for record in records] for records in counted.values()] == [[0, 1, 2], [3, 4]]


def test_report_and_watch_show_all_stages(home, tmp_path, capsys):
    assert main(["report", str(home), "--output", str(tmp_path / "both.html")]) == 0
    assert "staged: 2 stages" in (tmp_path / "both.html").read_text()
    page = Page(home)
    assert "staged: 2 stages" in page.text() and page.finished
    assert main(["report", str(home), str(home)]) == 2
    assert "it holds the runs 1-source, 2-target" in capsys.readouterr().err


def test_a_model_of_a_run_in_stages_is_that_of_its_last_finished_stage(home, tmp_path):
    found = resolve(home)
    assert found.run == home / "2-target" and found.step == 2
    records = read_stages(home)
    write_stages(tmp_path, [type(r)(r.name, r.folder) for r in records])
    with pytest.raises(ConfigError, match="holds the stages 1-source, 2-target, and none is finished"):
        resolve(tmp_path)
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(ConfigError, match="stages.json' is broken"):
        resolve(tmp_path)
    assert find_run(home / "1-source").done == 3
