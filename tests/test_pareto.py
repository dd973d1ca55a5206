"""Settings side by side: quality with differences of pairs, costs, and which of them no other beats."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch

from mmrl import pareto
from mmrl.cli import main
from mmrl.config.registry import find
from mmrl.config.schema import ConfigError, EvaluateConfig, parse
from mmrl.reporting import pareto as drawing
from mmrl.rewards.adapters import per_outcome
from mmrl.training import evaluate
from tests.support.svg import overlap, text_boxes
from tests.support.toys import ToyGenerate

HERE = "tests.test_pareto"


class Padded(ToyGenerate):
    """Add as many words to every answer; each is a product of 1 by `words` by 1 numbers."""

    def __init__(self, policy, *, stream, words: int = 0) -> None:
        super().__init__(policy, stream=stream)
        self.words = words

    def rollout(self, prompts):
        for _ in prompts if self.words else ():
            torch.ones(1, self.words) @ torch.ones(self.words, 1)
        return super().rollout(prompts)


@per_outcome
def by_length(prompt, outcome):
    """Prefer what the toy says at length, and some prompts to others."""
    return float(outcome.end) + 10 * int(prompt.uid[1:])


@contextmanager
def answers(engine, *, scale: float = 1.0):
    """A meter: count answers."""
    spent, asked, rollout = {}, [], engine.rollout
    engine.rollout = lambda prompts: asked.extend(prompts) or rollout(prompts)
    yield spent
    engine.rollout = rollout
    spent["answers"] = scale * len(asked)


RAW = {
    "policy": "tests.support.toys:ToyText",
    "evaluation": {
        "data": {"name": "tests.support.toys:prompts", "num": 6},
        "engine": [{"name": f"{HERE}:Padded"}],
        "rewards": [{"name": f"{HERE}:by_length", "label": "length"}],
        "num_generations": 2,
    },
    "settings": {"full": {}, "dear": {"evaluation.engine.0.words": 5}, "short": {"policy.length": 1}},
    "cost_metrics": ["operations", {"name": f"{HERE}:answers", "scale": 3.0}],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(evaluate, "RESAMPLES", 50)
    monkeypatch.setattr(pareto, "draw", lambda found, costs: f"<svg>{found.metric} {len(costs)}</svg>")


@pytest.fixture
def config():
    return lambda **changes: parse({**RAW, **changes}, EvaluateConfig)


def row(quality, cost):
    return drawing.SettingResult({}, {"good": (quality, quality, quality)}, {}, {"cost": cost})


# ---- measuring


def test_settings_answer_the_same_prompts_with_the_same_draws(config, tmp_path):
    found = pareto.compare(config(), tmp_path / "out")
    full, dear, short = (found.rows[name] for name in ("full", "dear", "short"))
    assert found.metric == "length"
    # More words cost, and leave the answers as they are: the difference is exactly 0.
    assert dear.quality == full.quality
    assert dear.difference["length"] == full.difference["length"] == (0.0, 0.0, 0.0)
    # Answers of one word have the length 1: 1 + 10 * (0 + ... + 5) / 6 = 26.
    assert short.quality["length"][0] == 26.0
    gap, low, high = short.difference["length"]
    assert gap == 26.0 - full.quality["length"][0] and low <= gap <= high < 0
    # Prompts differ by 10 each and answers by 3 at most: only pairs tell the difference so closely.
    assert high - low < 3 < short.quality["length"][2] - short.quality["length"][1]


def test_costs_are_per_prompt(config, tmp_path):
    found = pareto.compare(config(), tmp_path)
    # Two answers to a prompt: 2 products with an addition of 5 numbers; the toy itself multiplies nothing.
    assert [found.rows[name].costs["operations"] for name in ("full", "dear")] == [0.0, 2 * 2 * 5]
    assert found.rows["full"].costs["answers"] == 3.0 * 2
    assert all(one.costs["seconds"] > 0 for one in found.rows.values())
    assert found.costs == ["operations", "answers", "seconds"]


def test_what_is_written_holds_everything(config, tmp_path):
    found = pareto.compare(config(), tmp_path)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert list(written["settings"]) == ["full", "dear", "short"]
    assert (written["target_metric"], written["prompts"]) == ("length", 6)
    short = written["settings"]["short"]
    assert short["changes"] == {"policy.length": 1}
    assert short["metrics"] == {"length": 26.0}
    assert short["differences"]["length"] == found.rows["short"].difference["length"][0]
    assert short["intervals_of_differences"]["length"] == list(found.rows["short"].difference["length"][1:])
    assert written["optimal"]["operations"] == ["full"]
    assert (tmp_path / "pareto.svg").read_text() == "<svg>length 3</svg>"
    page = (tmp_path / "evaluation.html").read_text()
    assert page.count("<svg>length 1</svg>") == 3, "a plot for every cost"
    assert all(one in page for one in ("length against operations</fig", "difference to full", "policy"))


def test_what_was_measured_stays_when_a_later_setting_fails(config, tmp_path):
    wanted = config(settings={"full": {}, "broken": {"evaluation.engine.0.words": -1}})
    with pytest.raises(RuntimeError):
        pareto.compare(wanted, tmp_path)
    assert list(json.loads((tmp_path / "evaluation.json").read_text())["settings"]) == ["full"]


def test_the_gap_of_answers_to_other_prompts_is_refused():
    first = pareto.Resampled(("p0", "p1"), {}, {}, {})
    with pytest.raises(ValueError, match="the first answered 2 rows and another 1"):
        pareto.describe(None, pareto.Resampled(("p0",), {}, {}, {}), first, {}, {})


def test_a_clock_knows_how_long_a_prompt_takes(monkeypatch):
    ticks = iter([10.0, 16.0])
    monkeypatch.setattr(pareto.time, "perf_counter", lambda: next(ticks))
    prompts = find("data", "tests.support.toys:prompts").target(num=3)
    engine = ToyGenerate(find("policy", "tests.support.toys:ToyText").target(), stream=pareto.Stream())
    clock = pareto.TimedEngine(engine)
    assert len(clock.rollout([*prompts, *prompts])) == 6
    assert clock.seconds == [2.0]  # 6 seconds for 3 prompts, each asked twice


# ---- what no other beats


def test_the_front_drops_what_another_beats():
    points = {"a": (1.0, 5.0), "b": (2.0, 3.0), "c": (2.0, 4.0), "d": (3.0, 3.0), "e": (4.0, 1.0)}
    # c pays as much as b for less; d pays more for as much.
    rows = {name: row(loss, cost) for name, (cost, loss) in points.items()}
    assert drawing.SettingsComparison(rows, "good", greater_is_better=False).optimal("cost") == [
        "a",
        "b",
        "e",
    ]
    twins = {"a": row(1.0, 1.0), "twin": row(1.0, 1.0)}
    assert drawing.SettingsComparison(twins, "good").optimal("cost") == ["a", "twin"]


def test_optimal_settings_are_named_cheapest_first_and_know_what_is_better():
    rows = {
        "full": row(0.9, 8.0),
        "half": row(0.8, 4.0),
        "bad": row(0.7, 5.0),
        "no number": row(float("nan"), 1.0),
    }
    assert drawing.SettingsComparison(rows, "good").optimal("cost") == ["half", "full"]
    assert drawing.SettingsComparison(rows, "good", greater_is_better=False).optimal("cost") == [
        "half",
        "bad",
    ]


def test_the_table_marks_them():
    rows = {"full": row(0.9, 8.0), "half": row(0.8, 4.0), "bad": row(0.7, 5.0)}
    titles, lines = drawing.cells(drawing.SettingsComparison(rows, "good"))
    assert titles == ["setting", "good", "difference to full", "cost per prompt"]
    assert [line[-1] for line in lines] == ["8 (1.00x) *", "4 (0.50x) *", "5 (0.62x)"]
    assert lines[1][:3] == ["half", "0.800 (0.800 to 0.800)", ""]


def test_the_plot_has_a_panel_for_every_cost_and_names_every_setting():
    def costs(one, other):
        return {"money": one, "time": other}

    rows = {
        "full": drawing.SettingResult({}, {"good": (0.9, 0.8, 1.0)}, {}, costs(8.0, 100.0)),
        "half & $half$": drawing.SettingResult({}, {"good": (0.8, 0.8, 0.8)}, {}, costs(4.0, 1.0)),
        "free": drawing.SettingResult({}, {"good": (0.1, 0.2, 0.3)}, {}, costs(0.0, 3.0)),
    }
    found = drawing.SettingsComparison(rows, "good")
    drawn = drawing.draw(found, found.costs)
    assert drawn.startswith("<svg") and drawn.rstrip().endswith("</svg>") and 'viewBox="0 0 720 ' in drawn
    assert all(drawn.count(f">{one}<") == 1 for one in ("money per prompt", "time per prompt"))
    assert drawn.count(">good<") == 2
    assert all(drawn.count(f">{one}<") == 1 for one in ("full", "half &amp; $half$", "free")), "one legend"
    assert "mathdefault" not in drawn and ">10<" in drawn and ">100<" in drawn, "numbers of the log axis"
    for cost in found.costs:
        assert 'viewBox="0 0 360 ' in drawing.draw(found, [cost]), "as wide as other charts"


def test_settings_at_one_point_and_near_each_other_are_all_named_and_no_letters_touch():
    def at(quality, cost):
        return drawing.SettingResult({}, {"m": (quality, quality - 0.04, quality + 0.04)}, {}, {"cost": cost})

    rows = {
        "full": at(0.50, 9.2e7), "twin of full": at(0.50, 9.2e7), "nearly full": at(0.501, 9.25e7),
        "a name of a setting that is much longer than all the others": at(0.5, 8.9e7),
        "half": at(0.11, 9.9e7), "good and cheap": at(0.52, 8.8e7), "bad": at(0.2, 8.7e7),
        **{f"setting {i}": at(0.3 + 0.01 * i, (9.0 + 0.05 * i) * 1e7) for i in range(8)},
    }  # fmt: skip
    drawn = drawing.draw(drawing.SettingsComparison(rows, "m"), ["cost"])
    boxes = text_boxes(drawn)
    assert not [pair for pair in combinations(boxes, 2) if overlap(*pair)]
    height = float(re.search(r'viewBox="0 0 360 ([\d.]+)"', drawn)[1])
    assert all(a >= 0 and b >= 0 and c <= 360 and d <= height for a, b, c, d in boxes)
    assert all(f">{name}<" in drawn for name in ("full", "twin of full", "setting 7"))


@pytest.mark.parametrize(
    ("costs", "wanted"),
    [((1.0, 2.0), "1 1.5 2"), ((1.0, 12.0), "2 5 10"), ((3e6, 3e8), "3M 10M 30M 100M 300M"),
        ((1.0, 1e6), "1 100 10k 1M"),
     ((0.0131, 0.0139), "0.0132 0.0134")],
)  # fmt: skip
def test_ticks_of_costs_are_few_and_readable(costs, wanted):
    found = drawing.SettingsComparison({"a": row(0.5, costs[0]), "b": row(0.6, costs[1])}, "good")
    drawn = drawing.draw(found, ["cost"])
    ticks = re.findall(r'text-anchor: middle"[^>]*>([^<]*)</text>', drawn)
    assert set(wanted.split()) <= set(ticks) and len(ticks) <= 9, ticks


def test_a_setting_without_a_number_is_left_out_of_the_plot_alone():
    rows = {"full": row(0.9, 8.0), "half": row(0.8, 4.0), "none": row(float("nan"), 1.0)}
    drawn = drawing.draw(drawing.SettingsComparison(rows, "good"), ["cost"])
    assert ">half<" in drawn and ">none<" not in drawn
    empty = drawing.draw(drawing.SettingsComparison({"none": rows["none"]}, "good"), ["cost"])
    assert "cost per prompt" in empty and ">none<" not in empty


# ---- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {"a": {"policy.lenth": 2}}},
            "settings.a: policy: policy 'tests.support.toys.ToyText' has no",
        ),
        ({"settings": {"a": {"policy.lenth": 2}}}, "did you mean 'length'?"),
        ({"settings": {"a": {"polcy": 2}}}, "settings.a: there is no key 'polcy'; did you mean 'policy'?"),
        ({"settings": {"a": {"evaluation.engine": []}}}, "settings.a: 'evaluation.engine' is empty"),
        (
            {"cost_metrics": ["operation"]},
            "cost_metrics[0]: no cost is called 'operation'; did you mean 'operations'?",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(config, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(pareto, "load_evaluator", lambda config: pytest.fail("something was loaded"))
    with pytest.raises(ConfigError) as raised:
        pareto.compare(config(**changes), tmp_path / "out")
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_metric_that_is_not_there_is_named(config, tmp_path):
    with pytest.raises(
        ConfigError, match="target_metric: no metric is called 'lenght'; did you mean 'length'?"
    ):
        pareto.compare(config(target_metric="lenght"), tmp_path)


# ---- the command


def test_the_command_prints_a_line_for_every_setting(config, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(RAW | {"output_dir": str(tmp_path / "out")}))
    assert main(["check", str(path)]) == 0
    assert main(["evaluate", str(path), "settings.greedy.policy.length=2"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("setting ") :].splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["full", "dear", "short", "greedy"]
    names = sorted(path.name for path in (tmp_path / "out" / "predictions").glob("*.parquet"))
    assert names == ["dear.parquet", "full.parquet", "greedy.parquet", "short.parquet"]
    assert "difference to full" in table[0] and "operations per prompt" in table[0]


def test_the_command_tells_what_is_wrong_with_a_setting(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(RAW | {"settings": {"a": {"evaluation.engine.0.wrds": 1}}}))
    assert main(["check", str(path)]) == 2
    assert "did you mean 'words'?" in capsys.readouterr().out
    assert main(["evaluate", str(path)]) == 2
    assert "settings.a: evaluation.engine[0]" in capsys.readouterr().err
