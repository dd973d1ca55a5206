"""When a run ends by a metric of its steps."""

from __future__ import annotations

import math

import pytest

from mmrl.config.loading import ConfigError
from mmrl.stop_rules import EarlyStopping, Threshold
from mmrl.training.loop import train
from tests.support.resuming import Killed, without_times
from tests.support.toys import toy_run


def ends_after(rule, values, name="u"):
    """Give a rule the values of a metric, step by step, and return after how many it ends the run."""
    for step, value in enumerate(values, start=1):
        rule.on_event("step_end", step, {name: value, "reward": 0.0})
        if rule.ended:
            return step
    return None


def test_threshold_takes_the_mean_of_a_window():
    # Means of two: 0.5, 0.75, 0.85, 0.95; the first above 0.8 is that of the fourth value.
    assert ends_after(Threshold(of="u", above=0.8, window=2), [0.4, 0.6, 0.9, 0.8, 1.1]) == 4
    assert ends_after(Threshold(of="u", above=0.8, window=2, patience=2), [0.4, 0.6, 0.9, 0.8, 1.1]) == 5
    assert ends_after(Threshold(of="u", below=0.5), [0.6, 0.5, 0.49]) == 3
    assert ends_after(Threshold(of="u", above=0.5, window=3), [0.9, 0.9]) is None  # no window is full


def test_a_value_that_is_not_finite_is_left_out():
    assert ends_after(Threshold(of="u", above=0.5, window=2), [0.9, math.nan, math.inf, 0.8]) == 4


def test_patience_counts_measurements_in_a_row():
    assert ends_after(Threshold(of="u", above=0.5, patience=2), [0.6, 0.4, 0.6, 0.6]) == 4


def test_early_stopping_compares_with_the_best_so_far():
    # An uncertainty that falls to 0.3 and rises again: 0.4, 0.35 and 0.5 are no improvement on 0.3.
    falling = EarlyStopping(of="u", greater_is_better=False, patience=3)
    assert ends_after(falling, [0.6, 0.3, 0.4, 0.35, 0.5, 0.2]) == 5
    assert ends_after(EarlyStopping(of="u", threshold=0.1, patience=2), [0.5, 0.55, 0.58]) == 3


def test_a_rule_that_is_saved_goes_on_alike():
    values = [0.6, 0.3, 0.4, 0.35, 0.5]
    for cut in range(len(values)):
        first, second = (EarlyStopping(of="u", greater_is_better=False, window=2, patience=2) for _ in "ab")
        assert ends_after(first, values[:cut]) is None
        second.load_state_dict(first.state_dict())
        assert ends_after(second, values[cut:]) == 5 - cut


def test_a_metric_that_is_not_there_is_an_error_and_an_evaluation_is_waited_for():
    with pytest.raises(ConfigError, match="until: the run has no metric 'rewrd'; did you mean 'reward'?"):
        ends_after(Threshold(of="rewrd", above=0.0), [1.0])
    rule = Threshold(of="eval_mean", above=0.5)
    assert ends_after(rule, [1.0, 1.0]) is None
    rule.on_event("step_end", 3, {"eval_mean": 0.6})
    assert rule.ended
    with pytest.raises(ConfigError, match="no metric 'eval_mean'"):
        rule.on_event("step_end", 3, {"eval_share": 0.6})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither"),
        ({"above": 1.0, "below": 0.0}, "both"),
        ({"of": "step_time", "above": 1.0}, "by a clock"),
    ],
)
def test_options_that_make_no_rule(options, message):
    with pytest.raises(ValueError, match=message):
        Threshold(**{"of": "u", **options})


def test_a_run_ends_by_its_metric_and_a_resume_decides_alike(tmp_path):
    changes = {"until": {"name": "threshold", "of": "reward", "above": 0.05, "window": 3}, "max_steps": 20}
    whole = toy_run(tmp_path / "whole", **changes)
    assert train(whole)
    taken = whole.progress.step
    assert 3 <= taken < 20
    for at in {1, taken - 1}:
        run = toy_run(tmp_path / f"run{at}", **changes, save_steps=2)
        finish = run.finish

        def dying(step, collection, credit, finish=finish, at=at):
            if step == at:
                raise Killed
            finish(step, collection, credit)

        run.finish = dying
        with pytest.raises(Killed):
            train(run)
        again = toy_run(tmp_path / f"run{at}", **changes, save_steps=2)
        train(again)
        assert str(without_times(again.journal.read())) == str(without_times(whole.journal.read()))
        train(again := toy_run(tmp_path / f"run{at}", **changes, save_steps=2))  # it has ended
        assert again.progress.step == taken


def test_a_reward_that_is_not_there_is_known_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="until.of: no reward is called 'brevty'; did you mean 'brevity'?"):
        toy_run(tmp_path, until={"name": "threshold", "of": "rewards/brevty/mean", "above": 0.0})
    with pytest.raises(ConfigError, match="'until' reads 'eval_mean', but 'eval_steps' is 0"):
        toy_run(tmp_path, until={"name": "early_stopping", "of": "eval_mean"})
