"""Answers to other prompts inside the groups, and KTO's level from them."""

from __future__ import annotations

import math

import pytest

from mmrl.build import build
from mmrl.config.loading import read
from mmrl.core.rng import Stream
from mmrl.engines.dataset_answers import Offline, WithMismatched
from mmrl.training.loop import train
from tests.support.configs import method_file
from tests.support.toys import ToyText, prompts
from tests.test_configs import on_a_toy


def rolled(num=3, times=3):
    asked = [prompt for prompt in prompts(num=num, answers=2) for _ in range(times)]
    return WithMismatched(Offline(ToyText(), stream=Stream())).rollout(asked)


def test_the_last_rollout_of_every_prompt_answers_the_next():
    rows = rolled()
    strange = [row for row in rows if "unrelated" in row.outcomes[-1].tags]
    own = [row for row in rows if row not in strange]
    assert [row.prompt.uid for row in own] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert [row.prompt.uid for row in strange] == ["p0", "p1", "p2"]
    answers = [prompt.answers[0].text for prompt in prompts(num=3)]
    assert [row.outcomes[-1].text for row in strange] == [answers[1], answers[2], answers[0]]
    assert [row.steps[0] for row in strange] == [0, 1, 2]  # behind their own prompts
    assert not any(row.on_policy or row.outcomes[-1].recorded for row in strange)


def test_a_prompt_that_is_asked_once_keeps_its_answer():
    assert [row.outcomes[-1].tags for row in rolled(times=1)] == [{"finish": "stop"}] * 3


def test_a_prompt_that_is_alone_meets_its_own_answer():
    rows = rolled(num=1)
    assert rows[-1].outcomes[-1].text == rows[0].outcomes[-1].text


@pytest.fixture
def no_page(monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)


def test_kto_measures_unrelated_answers_and_learns_from_the_others(tmp_path, no_page):
    config = on_a_toy(read(method_file("kto")), tmp_path / "run", max_steps=10)
    run = build(config, quiet=True)
    train(run)
    steps = run.journal.read()
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-6) and steps[-1]["loss"] < 0.48
    assert steps[0]["rewards/unrelated"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["rewards/chosen"] > 0 > steps[-1]["rewards/rejected"]
    levels = [step["rewards/unrelated"] for step in steps]
    assert any(abs(level) > 1e-3 for level in levels) and all(map(math.isfinite, levels))
    # The level of the step before is what the loss takes off.
    (kto,) = run.learner.objective.compare
    assert kto.options["delta"] == pytest.approx(levels[-2])
