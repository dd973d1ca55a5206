"""Checks while training, on metrics written by hand and in runs of the toy policy."""

from __future__ import annotations

import math

import pytest

from mmrl.build import check
from mmrl.config.binding import Pieces
from mmrl.config.consistency import check_some
from mmrl.config.registry import find
from mmrl.config.schema import Config, ConfigError, Piece, parse, parse_some
from mmrl.core.rng import Stream
from mmrl.diagnostics.checks import training_metrics
from mmrl.diagnostics.context import Finding
from mmrl.training.loop import train
from tests.support.toys import toy_run


def texts_of(check):
    """Give the texts of what a check finds."""
    return lambda records, **options: [finding.text for finding in check(records, **options)]


reward_hacking = texts_of(training_metrics.reward_hacking)
metric_drop = texts_of(training_metrics.metric_drop)
metric_spike = texts_of(training_metrics.metric_spike)
logprob_mismatch = texts_of(training_metrics.logprob_mismatch)
effective_samples = texts_of(training_metrics.effective_samples)


def journal(**columns) -> list[dict]:
    """Lay columns out as records; None is a step at which a metric was not reported."""
    length = max(map(len, columns.values()))
    return [
        {
            "step": step,
            **{name: c[step] for name, c in columns.items() if step < len(c) and c[step] is not None},
        }
        for step in range(length)
    ]


def held_out(values, lows=None) -> dict:
    return {"eval_taste": values, "eval_taste/low": lows or [v if v is None else v - 0.1 for v in values]}


# ---- reward_hacking

RISING = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_held_out_metric_that_falls_while_the_reward_rises_is_told_once():
    records = journal(reward=RISING, **held_out([1.0, None, 0.95, None, 0.8, 0.5]))
    # The interval of the start ends at .9: .95 is in it, .8 at step 5 is not. The reward began at
    # (0 + .1) / 2 and has come to (.3 + .4) / 2.
    said = reward_hacking(records)
    assert len(said) == 1
    assert "eval_taste fell to 0.8 at step 5, below the interval it began in (1, from 0.9)" in said[0]
    assert "while reward rose from 0.05 to 0.35" in said[0]
    # However far the run has come, it says the same.
    assert [reward_hacking(records[:n]) for n in range(7)] == [[]] * 5 + [said] * 2


def test_a_fall_inside_the_interval_or_without_a_rise_is_no_warning():
    assert reward_hacking(journal(reward=RISING, **held_out([1.0, None, 0.95, None, 0.91]))) == []
    assert reward_hacking(journal(reward=RISING[::-1], **held_out([1.0, None, 0.5, None, 0.4]))) == []
    assert reward_hacking(journal(reward=[0.5] * 6, **held_out([1.0, None, None, None, None, 0.4]))) == []
    assert reward_hacking(journal(reward=RISING, **held_out([1.0, None, None, None, None, 2.0]))) == []
    assert reward_hacking(journal(reward=RISING)) == [], "nothing is held out"
    assert reward_hacking([]) == []


def test_several_held_out_metrics_are_watched():
    records = journal(
        reward=RISING,
        **held_out([1.0, None, None, 0.5]),
        **{"eval_other": [3.0, None, None, 1.0], "eval_other/low": [2.0, None, None, 0.5]},
    )
    assert [text.split()[0] for text in reward_hacking(records)] == ["eval_other", "eval_taste"]
    assert [text.split()[0] for text in reward_hacking(records, of=("taste",))] == ["eval_taste"]


def test_a_held_out_metric_may_be_set_against_another_reward():
    records = journal(
        reward=RISING[::-1], **{"rewards/clip/mean": RISING}, **held_out([1.0, None, None, 0.5])
    )
    assert reward_hacking(records) == []
    assert len(reward_hacking(records, rising="rewards/clip/mean")) == 1


# ---- collapses


def test_a_metric_that_falls_below_a_share_of_its_start_has_collapsed():
    records = journal(reward_std=[1.0, 0.6, 0.5, 0.1, 0.05, 0.09, 0.0])
    # It begins at (1 + .6) / 2 = .8. Means of two: .3, .075, .07 and .045; the bar is a tenth, .08.
    said = metric_drop(records, window=2)
    assert said == ["reward_std collapsed to 0.075 at step 5; it began at 0.8, and the bar is 0.1 of that"]
    assert metric_drop(records[:4], window=2) == []
    assert metric_drop(records, window=2, share=0.5)[0].startswith("reward_std collapsed to 0.3 at step 4")
    assert metric_drop(records, window=2, share=0.05) == []
    assert metric_drop(records) == [], "there are no ten records"
    assert metric_drop(journal(reward_std=[1.0, 0.0, 0.0]), window=2) == [], "start and end do not overlap"


@pytest.mark.parametrize("values", [[], [0.0] * 4, [1.0] * 4, [math.nan] * 4, [1.0]])
def test_what_never_was_or_did_not_change_has_not_collapsed(values):
    assert metric_drop(journal(reward_std=values) if values else [], window=1) == []


# ---- rises


def test_a_metric_above_its_bar_has_risen():
    records = journal(**{"rewards/saturation/mean": [0.1, math.nan, 0.2, 0.4, 0.1]})
    said = ["rewards/saturation/mean rose to 0.4 at step 4; the bar is 0.3"]
    assert metric_spike(records, of="rewards/saturation/mean", above=0.3) == said
    # Means of two where there is a number: .15, .3, .25
    assert metric_spike(records, of="rewards/saturation/mean", above=0.31, window=2) == []
    assert metric_spike(records, of="rewards/saturation/mean", above=0.29, window=2)[0].endswith(
        "step 4; the bar is 0.29"
    )


# ---- effective_samples


def test_answers_that_are_worth_few_of_the_policys_own_are_reported_once():
    worth = {"sampling/ess/rows": [1.0, 0.9, 0.5, 0.4, 0.3, 0.2]}
    (said,) = effective_samples(journal(**worth), window=2)
    assert said.startswith("answers were worth 45% of as many of the policy's own at step 4; the bar is 50%")
    assert effective_samples(journal(**worth), window=2, least=0.2) == []
    assert effective_samples(journal(reward=[0.5] * 9)) == [], "an engine may note no log-probabilities"
    assert effective_samples(journal(**{"sampling/ess/rows": [math.nan] * 9})) == []


# ---- logprob_mismatch


def test_engine_and_policy_agree_at_the_first_step():
    name = "sampling/sampling_logp_difference/mean"
    assert logprob_mismatch(journal(**{name: [1e-4, 0.5]})) == []
    (said,) = logprob_mismatch(journal(**{name: [0.02, 0.0]}))
    assert (
        said.startswith("the ratio is not 1 at step 1")
        and "differ by 0.02 on average, more than 0.001" in said
    )
    assert logprob_mismatch(journal(**{name: [0.02]}), tolerance=0.1) == []
    assert len(logprob_mismatch(journal(**{name: [1e-4]}), tolerance=1e-5)) == 1
    assert logprob_mismatch([]) == []
    cheap = [{**record, "cheap": "cache compression.visual_quant"} for record in journal(**{name: [0.5]})]
    assert logprob_mismatch(cheap) == [], "an engine may be cheaper on purpose"
    assert logprob_mismatch(journal(reward=[0.5])) == [], "an engine may note no log-probabilities"


# ---- what is not there


def test_a_metric_that_the_journal_does_not_have_is_told():
    records = journal(reward_std=[1.0, 1.0])
    for said in (
        metric_drop(records, of="rewardstd"),
        metric_spike(records, of="rewardstd", above=1.0),
        logprob_mismatch(records, of="rewardstd"),
    ):
        assert said == [
            "a check reads 'rewardstd', which the metrics of the run do not have; did you mean 'reward_std'?"
        ]
    assert reward_hacking(records) == [
        "a check reads 'reward', which the metrics of the run do not have; did you mean 'reward_std'?"
    ]


def test_what_an_evaluation_measures_is_waited_for():
    records = journal(reward=RISING, **{"eval_other": [None, None, 1.0]})
    assert reward_hacking(records[:2], of=("taste",)) == []
    (said,) = reward_hacking(records, of=("taste",))
    assert said.startswith("a check reads 'eval_taste', which the metrics of the run do not have")


def test_a_window_holds_a_record():
    for name, options in (
        ("metric_drop", {}),
        ("metric_spike", {"of": "reward", "above": 1.0}),
        ("reward_hacking", {}),
    ):
        with pytest.raises(ConfigError, match="window' must be at least 1, not 0"):
            Pieces(Stream()).make("check", Piece(name, {"window": 0, **options}))


# ---- in a run


def always_two(records, *, word: str = "fire"):
    """Find two things at every step."""
    return [Finding(f"{word} < 1"), Finding(f"{word}: at step {records[0]['step'] + 1}")]


ALWAYS = {"name": f"{__name__}:always_two", "word": "smoke"}


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("mmrl.reporting.console.Console.say", lambda self, text: lines.append(text))
    return lines


def test_a_warning_is_said_once_and_stands_at_the_head_of_the_page(tmp_path, said, drawn):
    run = toy_run(tmp_path, report={"checks": [ALWAYS], "trackers": []}, max_steps=3)
    train(run)
    assert [line for line in said if line.startswith("warning")] == [
        "warning: smoke < 1",
        "warning: smoke: at step 1",
    ]
    text = (tmp_path / "report.html").read_text()
    assert text.index("<h1>") < text.index(">Warnings during training<") < text.index(">Curves<")
    assert text.count("<li>smoke &lt; 1</li>") == text.count("<li>smoke: at step 1</li>") == 1


def test_a_run_without_warnings_has_no_box(tmp_path, said):
    run = toy_run(tmp_path, report={"trackers": []}, max_steps=1)
    train(run)
    assert ">Warnings during training<" not in (tmp_path / "report.html").read_text()
    assert not any(line.startswith("warning") for line in said)


def test_a_run_that_goes_on_reads_the_journal_from_its_beginning(tmp_path, said):
    options = {"report": {"checks": [ALWAYS], "trackers": []}, "save_steps": 1}
    train(toy_run(tmp_path, **options, max_steps=1))
    run = toy_run(tmp_path, **options, max_steps=3)
    train(run)
    steps = [record["step"] for record in run.report.records]
    assert steps == [0, 1, 2] == [record["step"] for record in run.journal.read()]
    assert run.report.raised == ["smoke < 1", "smoke: at step 1"]


def waning(prompts, outcomes):
    """A taste that gets worse with every evaluation, and differs between prompts."""
    waning.calls += 1
    return [int(prompt.uid[1:]) % 2 * 0.1 - waning.calls for prompt in prompts]


def growing(prompts, outcomes):
    """A reward that rises whatever the policy does."""
    growing.calls += 1
    return [growing.calls + 0.01 * i for i in range(len(prompts))]


def test_a_trained_reward_that_rises_beside_held_out_ones_that_fall_is_told(tmp_path, said):
    waning.calls = growing.calls = 0
    evaluation = {
        "data": {"name": "tests.support.toys:prompts", "num": 4},
        "rewards": [f"{__name__}:waning", "tests.support.toys:share_right", "tests.support.toys:brevity"],
    }
    run = toy_run(
        tmp_path,
        rewards=[f"{__name__}:growing"],
        evaluation=evaluation,
        eval_steps=2,
        max_steps=4,
        report={"checks": ["reward_hacking"], "trackers": [], "log_completions": False},
    )
    train(run)
    records = run.journal.read()
    assert "rewards/growing/mean" in records[0] and "rewards/waning/mean" not in records[0]
    for name in ("waning", "share_right", "brevity"):
        measured = records[1]
        assert measured[f"eval_{name}/low"] <= measured[f"eval_{name}"] <= measured[f"eval_{name}/high"]
        assert f"eval_{name}" not in records[0]
    (line,) = [line for line in said if line.startswith("warning: eval_waning")]
    # The first evaluation gives -1 or -.9, the second -2 or -1.9.
    assert line.startswith(
        "warning: eval_waning fell to -1.95 at step 4, below the interval it began in (-0.95"
    )


def test_the_last_evaluation_is_listened_to(tmp_path, said):
    waning.calls = growing.calls = 0
    run = toy_run(
        tmp_path,
        rewards=[f"{__name__}:growing"],
        evaluation={
            "data": {"name": "tests.support.toys:prompts", "num": 4},
            "rewards": [f"{__name__}:waning"],
        },
        eval_steps=2,
        max_steps=3,
        report={"checks": ["reward_hacking"], "trackers": [], "log_completions": False},
    )
    train(run)
    (line,) = [line for line in said if line.startswith("warning")]
    assert "fell to -1.95 at step 3" in line, "it was measured after the last step"
    assert "fell to -1.95" in (tmp_path / "report.html").read_text()


def test_the_ends_of_intervals_are_no_curves_of_their_own():
    from mmrl.reporting import html

    records = journal(**held_out([1.0, 2.0]))
    assert [text.count("<path") for text in html.curves({"run": records})] == [
        html.curves({"run": journal(eval_taste=[1.0, 2.0])})[0].count("<path")
    ]


# ---- checking

RUN = {
    "policy": "tests.support.toys:ToyText",
    "data": "tests.support.toys:prompts",
    "rollout": {"engine": ["tests.support.toys:ToyGenerate"]},
    "rewards": ["tests.support.toys:share_right"],
    "advantage": ["total", "group_normalize"],
    "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
}


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ("reward_hack", "no check is called 'reward_hack'; did you mean 'reward_hacking'"),
        ("metric_spike", "needs the options of, above"),
        ({"name": "metric_drop", "shared": 1.0}, "has no option 'shared'; it takes of, share, window"),
        ({"name": "metric_drop", "window": "x"}, "'report.checks\\[0\\].window' must be a whole number"),
    ],
)
def test_checks_are_checked_beforehand(piece, message):
    raw = {**RUN, "report": {"checks": [piece]}}
    with pytest.raises(
        ConfigError, match=f"report.checks\\[0\\].*{message}" if "window" not in message else message
    ):
        check(parse(raw, Config))
    variant = {"report": {"checks": [piece]}}
    with pytest.raises(ConfigError, match=message):
        check_some(variant, parse_some(variant, Config))


def test_a_check_is_listed_where_it_runs():
    for key, name, on in (
        ("checks", "gradient_flow", "start"),
        ("startup_checks", "metric_drop", "training"),
    ):
        with pytest.raises(ConfigError, match=f"report.{key}\\[0\\]: the check '{name}' runs on {on}, but"):
            check(parse({**RUN, "report": {key: [name]}}, Config))


def test_checks_are_found_by_name():
    for name in ("reward_hacking", "metric_drop", "metric_spike", "logprob_mismatch"):
        assert (find("check", name).full_name, find("check", name).on) == (name, "training")


class Heavy:
    """A reward that must not be made while a configuration is checked."""

    def __init__(self, *, model: str) -> None:
        raise AssertionError(f"loaded '{model}'")

    def __call__(self, prompts, outcomes):
        """Never get here."""


def test_checking_makes_no_reward():
    heavy = {"name": f"{__name__}:Heavy", "model": "large", "weight": 0.5}
    evaluation = {"data": "tests.support.toys:prompts", "rewards": [{**heavy, "label": "held_out"}]}
    check(parse({**RUN, "rewards": [heavy], "evaluation": evaluation}, Config))
    check_some({"rewards": [heavy]}, parse_some({"rewards": [heavy]}, Config))
    with pytest.raises(ConfigError, match="two rewards are called 'Heavy'"):
        check(parse({**RUN, "rewards": [heavy, heavy]}, Config))
    with pytest.raises(ConfigError, match="has no option 'modle'"):
        check(parse({**RUN, "rewards": [{"name": f"{__name__}:Heavy", "modle": "x"}]}, Config))
