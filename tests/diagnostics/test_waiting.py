"""The advice to ask for rollouts a step ahead."""

from __future__ import annotations

import re
import time
from typing import ClassVar

import pytest

from mmrl.diagnostics.waiting import STEPS, advise_asking_ahead
from mmrl.training.loop import train
from tests.support.toys import ToyGenerate, toy_run


class Slow(ToyGenerate):
    """Answer slowly in this process, which cannot learn meanwhile."""

    def rollout(self, prompts):
        time.sleep(0.2)
        return super().rollout(prompts)


class SlowElsewhere(Slow):
    """Answer slowly, as other processes do that can be asked ahead."""

    answers_elsewhere: ClassVar[bool] = True

    def ask(self, prompts):
        pass


def record(rollout, learn):
    return {"time/rollout": rollout, "time/learn": learn, "step_time": rollout + learn}


def test_the_idle_shares_are_those_of_the_steps_after_the_first():
    # 3 of 10 and 1 of 2 seconds: 4 of 12, which is a third; a quarter of all with the first step.
    steps = [record(0.0, 4.0), record(3.0, 7.0), record(1.0, 1.0)]
    said = advise_asking_ahead(steps)
    assert re.findall(r"\d+%", said) == ["33%", "67%"] and "`rollout.max_staleness: 1`" in said
    assert [advise_asking_ahead(steps[:n]) for n in range(STEPS)] == [""] * STEPS
    assert not advise_asking_ahead([*steps, record(3.0, 7.0)])  # once


def test_rollouts_that_take_little_are_not_worth_a_lag():
    assert not advise_asking_ahead([record(1.0, 4.0)] * STEPS)
    assert advise_asking_ahead([record(1.4, 4.0)] * STEPS)


@pytest.mark.parametrize(
    "engine, rollout, advised",
    [
        ("Slow", {}, 0),
        ("SlowElsewhere", {}, 1),
        ("SlowElsewhere", {"max_rounds": 2}, 0),
        ("SlowElsewhere", {"max_staleness": 1}, 0),
    ],
)
def test_a_run_is_advised_once_where_others_make_its_rollouts(
    engine, rollout, advised, tmp_path, monkeypatch
):
    changes = {"objective": {"step_weight": ["truncated_importance"]}, "max_steps": STEPS + 1}
    run = toy_run(tmp_path, rollout={"engine": [f"{__name__}:{engine}"], **rollout}, **changes)
    said = []
    monkeypatch.setattr(run.report.console, "say", said.append)
    train(run)
    assert len([line for line in said if "max_staleness" in line]) == advised
