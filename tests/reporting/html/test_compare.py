"""One page that compares several runs."""

from __future__ import annotations

import re
import shutil

import pytest

from mmrl.cli import main
from mmrl.config.schema import ConfigError
from mmrl.reporting.html.pages import comparison, named, write_comparison
from mmrl.reporting.html.run_folder import find_run, flattened
from mmrl.training.loop import train
from tests.reporting.html.test_run_page import Tags, outside
from tests.support.toys import toy_run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs that differ in their learning rate and in one reward."""
    home = tmp_path_factory.mktemp("runs")
    usual = {
        "references": {"ref": "frozen"},
        "objective": {"penalty": ["k3"]},
        "evaluation": {"data": {"name": "tests.support.toys:prompts", "num": 3}},
        "max_steps": 4,
    }
    rewards = ["tests.support.toys:share_right", {"name": "tests.support.toys:brevity", "weight": 0.25}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.training.evaluate.RESAMPLES", 20)
        train(toy_run(home / "slow", **usual))
        train(toy_run(home / "quick", **usual, learn={"learning_rate": 0.3}, rewards=rewards))
    return home


def rows(text: str, title: str) -> list[list[str]]:
    """Read the table under a heading."""
    inside = text.partition(f">{title}</h2>")[2].partition("</table>")[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in inside.split("<tr>")[1:]]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_page_sets_runs_side_by_side(drawn, two, tmp_path):
    path = write_comparison([two / "slow", two / "quick"], tmp_path / "deep" / "page.html")
    text = path.read_text()
    tags = Tags(text)
    assert outside(text) == [] and tags.wrong == [] and tags.open == []
    assert "<h1>2 runs side by side</h1>" in text
    assert rows(text, "Different settings") == [
        ["", "slow", "quick"],
        ["learn.learning_rate", "0.1", "0.3"],
        ["rewards[1].weight", "0.5", "0.25"],
    ]
    held_out = rows(text, "Held out")
    assert held_out[0] == ["", "slow", "quick"] and held_out[1][0] == "share_right"
    slow, quick = find_run(two / "slow"), find_run(two / "quick")
    assert held_out[1][1].startswith(f"{slow.metrics['share_right']:.3f} ")
    assert held_out[1][2].startswith(f"{quick.metrics['share_right']:.3f} ")
    trained = dict((row[0], row[1:]) for row in rows(text, "Training"))
    assert {"reward", "entropy, nats a step", "rollouts a second"} <= trained.keys()
    for figure in ("reward", "rewards/brevity/mean", "rewards/share_right/advantage_share", "entropy"):
        one = text.replace("<wbr>", "").partition(f">{figure}</figcaption>")[2].partition("</figure>")[0]
        assert re.findall(r"</i>(\w+) <output>", one) == ["slow", "quick"], figure


def test_runs_of_one_name_are_told_apart_and_one_run_is_shown_once(two, tmp_path):
    shutil.copytree(two / "slow", tmp_path / "slow")
    found = [find_run(one) for one in (two / "slow", tmp_path / "slow", two / "slow")]
    assert list(named(found)) == [f"{two.name}/slow", f"{tmp_path.name}/slow"]
    assert "Only their folders" in comparison(found)


def test_settings_are_flattened_to_dotted_names():
    config = {
        "policy": "toy",
        "objective": {"name": "gradient", "penalty": [{"name": "k3", "coef": 0.1}], "surrogate": "clip"},
        "advantage": ["total", {"name": "clip_advantage", "most": 2}],
        "by": ["group", "place"],
        "references": {},
    }
    assert flattened(config) == {
        "policy": "toy",
        "objective": "gradient",
        "objective.penalty[0]": "k3",
        "objective.penalty[0].coef": 0.1,
        "objective.surrogate": "clip",
        "advantage[0]": "total",
        "advantage[1]": "clip_advantage",
        "advantage[1].most": 2,
        "by": ["group", "place"],
        "references": {},
    }


# ---- the command


def test_one_run_is_drawn_anew(two, capsys):
    page = two / "slow" / "report.html"
    page.unlink()
    assert main(["report", str(two / "slow")]) == 0
    assert capsys.readouterr().out == f"report: {page}\n" and "<h1>slow</h1>" in page.read_text()


def test_several_runs_are_compared(two, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(two / "slow"), str(two / "quick")]) == 0
    assert capsys.readouterr().out == "report: comparison.html\n"
    assert main(["report", str(two / "slow"), str(two / "quick"), "--output", "x/y.html"]) == 0
    assert (tmp_path / "comparison.html").read_text() == (tmp_path / "x" / "y.html").read_text()


def test_a_wrong_folder_is_an_error_in_words(two, capsys, tmp_path):
    assert main(["report", str(two / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["report", str(two)]) == 2
    assert "it holds the runs quick, slow" in capsys.readouterr().err
    assert main(["report", str(two / "slow"), str(tmp_path), "--output", str(tmp_path / "x.html")]) == 2
    assert "it has no metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    with pytest.raises(ConfigError, match="no folder"):
        write_comparison([two / "slow", two / "gone"], tmp_path / "x.html")
