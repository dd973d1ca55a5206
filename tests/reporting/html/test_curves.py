"""Which numbers stand in one image."""

from __future__ import annotations

import math
import re

from mmrl.reporting.html.curves import (
    constants,
    curves,
    line_of,
    seconds_of,
    time_split,
)


def journal(num: int = 3, **columns):
    """Write a journal down: a list of numbers each, or a function of the step."""
    return [
        {"step": i, **{name.replace("__", "/"): values[i] for name, values in columns.items()}}
        for i in range(num)
    ]


def titles(figures):
    return [re.sub("<[^>]*>", "", re.search(r"<figcaption.*?</figcaption>", one)[0]) for one in figures]


def labels(figure):
    return re.findall(r"</i>([^<]*) <output>", figure)


def test_numbers_of_one_kind_are_in_one_image():
    records = journal(
        reward=[0.0, 0.5, 1.0],
        rewards__right__mean=[0.0, 1.0, 2.0],
        rewards__short__mean=[1.0, 0.0, 2.0],
        rewards__right__std=[1.0, 0.0, 2.0],
        entropy=[3.0, 2.0, 1.0],
        eval_score=[math.nan, 0.5, 0.75],
        eval_completions__mean_length=[1.0, 2.0, 3.0],
        steepness=[1.0, 2.0, 3.0],
        step_time=[1.0, 2.0, 3.0],
    )
    figures = curves({"run": records})
    assert titles(figures) == ["reward", "rewards by name", "held-out metrics", "entropy", "others"]
    assert labels(figures[1]) == ["right", "short"], "named by what differs"
    assert labels(figures[2]) == ["score"]
    assert labels(figures[4]) == ["steepness"], "what nobody foresaw"


def test_several_runs_share_a_image_of_every_number():
    runs = {
        name: journal(
            reward=[0.0, 0.5, top], rewards__right__mean=[0.0, 1.0, top], rewards__b__mean=[1, 2, top]
        )
        for name, top in (("one", 3.0), ("two", 4.0))
    }
    figures = curves(runs)
    assert titles(figures) == ["reward", "rewards/b/mean", "rewards/right/mean"]
    assert all(labels(figure) == ["one", "two"] for figure in figures)


def test_a_run_that_lacks_a_number_keeps_its_colour_in_the_others():
    runs = {
        "one": journal(reward=[0.0, 0.5, 1.0]),
        "two": journal(kl=[1.0, 2.0, 3.0], reward=[1.0, 0.0, 1.0]),
    }
    reward, kl = curves(runs)
    colours = re.findall(r'<li><i style="background:(#\w+)"></i>two', reward + kl)
    assert len(colours) == 2 and len(set(colours)) == 1


def test_what_never_moved_is_told_in_words():
    records = journal(
        reward=[0.0, 0.5, 1.0], kl=[0.25] * 3, loss=[1.0, 1.0 + 1e-9, 1.0], eval_x=[math.nan] * 3
    )
    figures = curves({"run": records})
    assert titles(figures) == ["reward", "constant metrics"]
    assert "kl 0.250, loss 1.00" in figures[1]
    assert constants({"run": journal(1, kl=[0.25])}, ["kl"]) == {}, "one record tells nothing"
    moved = {"one": journal(kl=[0.25] * 3), "two": journal(kl=[0.5] * 3)}
    assert constants(moved, ["kl"]) == {}, "runs differ"


def test_curves_leave_out_what_is_not_finite():
    records = [{"step": 0, "reward": 1.0, "kl": math.nan}, {"step": 1, "reward": math.inf, "kl": math.nan}]
    (figure,) = curves({"run": records})
    assert titles([figure]) == ["reward"] and figure.count("<use") == 1


def test_nothing_reported_draws_nothing():
    assert curves({"run": []}) == [] == curves({})
    assert time_split([]) == ""


def test_the_seconds_of_a_step_add_up():
    record = {
        "time/rollout": 1.0, "time/reward": 0.5, "time/learn": 2.0, "step_time": 4.0,
        "time/rollouts_per_second": 9.0,
    }  # fmt: skip
    assert seconds_of(record) == {"rollout": 1.0, "reward": 0.5, "learn": 2.0, "other": 0.5}
    assert seconds_of({"time/learn": 2.0, "step_time": 1.9})["other"] == 0.0
    again = {**record, "time/evaluate": 4.0, "step_time": 8.0}
    drawn = time_split([{"step": 0, **record}, {"step": 1, **again}])
    assert drawn.count("fill-opacity: 0.78") == 5 and labels(drawn)[:3] == ["rollout", "reward", "learn"]


def test_a_metric_that_is_not_finite_for_a_step_leaves_a_gap_and_one_not_measured_does_not():
    values = [1.0, math.nan, 3.0]
    broken = line_of("loss", [{"step": i, "loss": value} for i, value in enumerate(values)], "loss")
    assert (broken.x, str(broken.y)) == ([1, 2, 3], str(values))
    some = [{"eval_x": 1.0}, {}, {"eval_x": 3.0}]
    seldom = line_of("eval_x", [{"step": i, "loss": 0.0, **x} for i, x in enumerate(some)], "eval_x")
    assert (seldom.x, seldom.y) == ([1, 3], [1.0, 3.0])
