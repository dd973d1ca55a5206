"""The image demo runs from images to report, on synthetic images and with a few steps."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from PIL import Image, ImageDraw

from examples.image_rl import demo
from tests.support.tables import reward_table

QUICK = ("max_steps=1", "rollout.num_prompts=2", "rollout.num_generations=2", "evaluation.num_generations=2")
DRAWN = (("red", "circle"), ("blue", "circle"), ("red", "rectangle"))


def sources(folder):
    """Write the layout of easy-VQA: three red and blue shapes a split."""
    for split in ("train", "test"):
        (folder / split / "images").mkdir(parents=True)
        asked = []
        for number, (colour, shape) in enumerate(
            [("red", "circle"), ("blue", "circle"), ("red", "rectangle")]
        ):
            image = Image.new("RGB", (64, 64), (240, 240, 250))
            pen = ImageDraw.Draw(image)
            (pen.ellipse if shape == "circle" else pen.rectangle)((20, 20, 44, 44), fill=colour)
            image.save(folder / split / "images" / f"{number}.png")
            asked.append([f"what is the color of the {shape}?", colour, number])
        (folder / split / "questions.json").write_text(json.dumps(asked))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("open_clip")
    output = tmp_path_factory.mktemp("demo")
    small = {
        "images": [f"build.source={sources(tmp_path_factory.mktemp('easy_vqa'))}"],
        "judge": ["build.steps=2", "build.batch_size=8", "build.width=4"],
        "model": ["build.width=32", "build.layers=1", "build.text_width=16"],
        "matching": ["max_steps=2", "rollout.num_prompts=3", "evaluation.num_generations=2"],
    }
    first = demo.demo(output, seed=3, overrides=QUICK, start_overrides=small)
    return output, small, first


@pytest.mark.slow
def test_the_summary_holds_the_start_and_three_methods_with_costs(finished):
    output, _, summary = finished
    assert json.loads((output / "summary.json").read_text()) == summary
    assert summary["built"]["images"]["captions"] == 3
    for name in demo.METHODS:
        metrics, intervals = summary[name]["metrics"], summary[name]["intervals"]
        assert set(demo.SHOWN) <= set(metrics)
        for reward in demo.REWARDS:
            before = summary["start"]["metrics"][reward]
            assert metrics[f"gain in {reward}"] == pytest.approx(metrics[reward] - before, abs=1e-6)
            assert len(intervals[f"gain in {reward}"]) == 2


@pytest.mark.slow
def test_network_evaluations_are_those_of_training_alone(finished):
    # Four rows of 8 steps, of which 4 are learned from, and asked of the reference too: 4 (8 + 4 + 4).
    # TP-GRPO completes the prefixes of 0 to 3 steps: 8 + 7 + 6 + 5 = 26 more of each row.
    # AWM draws 4 times and asks two references: 4 (8 + 3 * 4).
    spent = {name: finished[2][name]["metrics"]["network evaluations"] for name in demo.METHODS}
    assert spent == {"flow_grpo": 64, "tp_grpo": 168, "awm": 80}


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself_and_shows_grids_and_trajectories(finished):
    page = (finished[0] / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*['\"]?\s*(?:https?:|//|file:)|url\((?!#)", page)
    grid, trajectories = page.split("<h2>Turning points</h2>")
    # Three captions, four models, two images each; then rows of five prefixes.
    assert grid.count("<img ") == 3 * 4 * 2
    assert trajectories.split("<h2>")[0].count("<img ") == 3 * 5
    for words in ("flow_grpo", "tp_grpo", "awm", "a blue circle", "network evaluations"):
        assert words in page


@pytest.mark.slow
def test_a_second_run_keeps_the_start_and_another_seed_does_not(finished, monkeypatch):
    output, small, first = finished

    def refused(*given):
        raise AssertionError("built anew")

    monkeypatch.setattr(demo, "build", refused)
    start = demo.prepare(output, 3, small)
    assert start.measured.metrics["clip_score"] == pytest.approx(
        first["start"]["metrics"]["clip_score"], abs=1e-6
    )
    assert len(start.records) == 2 and dict(start.built) == first["built"]
    assert (start.model / "model_index.json").is_file()
    for seed, changes in ((4, small), (3, {**small, "judge": ["build.steps=3"]})):
        kept = (output / "start.json").read_text()
        with pytest.raises(AssertionError, match="built anew"):
            demo.prepare(output, seed, changes)
        (output / "start.json").write_text(kept)


def test_gain_is_the_mean_change_of_rows_with_an_interval_over_prompts():
    # Two prompts with two rows each; the changes .1, .3 and .5, .7 have the means .2 and .6.
    before = reward_table([0.0, 0.1, 0.2, 0.3], group="aabb")
    after = reward_table([0.1, 0.4, 0.7, 1.0], group="aabb")
    name = next(iter(before.scored))
    mean, (low, high) = demo.gain(before, after, name)
    assert mean == pytest.approx(0.4)
    # Of two prompts drawn with replacement, a quarter of the draws have one of them twice.
    assert (low, high) == (pytest.approx(0.2), pytest.approx(0.6))


def test_spent_counts_what_happens_between_the_ends_of_steps():
    policy = SimpleNamespace(evaluations=100)
    measuring = lambda *given: setattr(policy, "evaluations", policy.evaluations + 1000)
    run = SimpleNamespace(policy=policy, finish=measuring, report=SimpleNamespace(began=0.0))
    spent = demo.Spent()
    spent.watch(run)
    for made in (3, 4):
        policy.evaluations += made
        run.finish("step")
    assert spent.evaluations == 7
    assert [evaluations for _, evaluations in spent.log] == [3, 7]
    assert policy.evaluations == 2107


def test_the_fingerprint_follows_seed_and_overrides():
    changes = {name: [] for name in (*demo.BUILT, "matching")}
    key = demo.fingerprint(changes, 0)
    assert key == demo.fingerprint(changes, 0)
    assert key != demo.fingerprint(changes, 1)
    assert key != demo.fingerprint({**changes, "judge": ["build.steps=1"]}, 0)


def test_the_fingerprint_follows_the_source_of_every_builder(monkeypatch):
    names = {path.name for path in demo.SOURCES}
    assert {"easy_vqa_captions.py", "tiny_clip.py", "tiny_flow_model.py"} <= names
    changes = {name: [] for name in (*demo.BUILT, "matching")}
    key = demo.fingerprint(changes, 0)
    monkeypatch.setattr(demo, "SOURCES", demo.SOURCES[1:])
    assert key != demo.fingerprint(changes, 0)


@pytest.mark.parametrize("spent", ["seconds", "evaluations"])
def test_the_benchmark_finds_when_a_reward_is_first_reached(spent):
    from benchmarks.flow_reward_per_second import reaches, sooner

    points = [{spent: at, "clip_score": reward} for at, reward in ((0, 0.2), (10, 0.4), (20, 0.3), (30, 0.6))]
    # 0.3 lies half way from 0.2 to 0.4; 0.5 two thirds of the way from 0.3 to 0.6.
    assert reaches(points, 0.3, spent) == pytest.approx(5)
    assert reaches(points, 0.5, spent) == pytest.approx(20 + 10 * 2 / 3)
    assert reaches(points, 0.7, spent) is None
    slow = [{spent: at, "clip_score": reward} for at, reward in ((0, 0.2), (40, 0.3))]
    found = sooner({0: {"flow_grpo": slow, "tp_grpo": points, "awm": slow}}, spent)
    assert found["tp_grpo"] == {"each": [8.0], "mean": 8.0}
    assert found["awm"] == {"each": [1.0], "mean": 1.0}
