"""A curriculum by the velocity of rewards: averages by hand, and the opening of sources."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.papers.gear import AbductionScore, LearningVelocity
from tests.support.observing import by_source, made, next_step, observe, shown, uids


def curriculum(**options):
    return made(LearningVelocity, data=by_source("a", "b", "c"), by="source", **options)


def step(sampler, **levels):
    next_step(sampler)
    sampler.draw(1, 2)
    observe(sampler, {f"p{'abc'.index(name)}": [level, level] for name, level in levels.items()})
    sampler.observe_advantages(shown({"p0": [0.0]}))


def test_a_velocity_is_the_moving_average_of_changes():
    sampler = curriculum(decay=0.9, floor=0.05)
    step(sampler, a=0.2, b=0.5)
    assert sampler.velocity.tolist() == [0.0] * 3, "a first mean is no change"
    step(sampler, a=0.6)
    step(sampler, a=0.5, b=0.1)
    # a: 0.9 (0.1 * 0.4) + 0.1 (-0.1) = 0.026; b: 0.1 (0.1 - 0.5) = -0.04.
    assert sampler.velocity.tolist() == pytest.approx([0.026, -0.04, 0.0])
    # 0.076, 0.05 and 0.05 of 0.176.
    assert sampler.probabilities.tolist() == pytest.approx([0.076 / 0.176, 0.05 / 0.176, 0.05 / 0.176])


def test_rounds_of_a_step_are_one_mean():
    sampler = curriculum()
    next_step(sampler)
    sampler.draw(1, 1)
    observe(sampler, {"p0": [1.0]})
    observe(sampler, {"p0": [0.0, 0.0, None]})
    sampler.observe_advantages(shown({"p0": [0.0]}))
    assert sampler.level[0] == pytest.approx(1 / 3)


def test_a_source_opens_once_the_one_before_is_good_enough():
    sampler = curriculum(open_at=0.5)
    assert sampler.probabilities.tolist() == [1.0, 0.0, 0.0]
    assert uids(sampler.draw(2, 1)) == ["p0"], "no prompt of a source that is not open"
    step(sampler, a=0.4)
    assert sampler.opened == 1
    step(sampler, a=0.5)
    assert sampler.opened == 2 and sampler.probabilities[2] == 0.0
    step(sampler, a=0.1, b=0.9)
    assert sampler.opened == 3, "and stays open"


def test_a_saved_curriculum_goes_on():
    sampler, other = curriculum(open_at=0.5), curriculum(open_at=0.5)
    step(sampler, a=0.3)
    step(sampler, a=0.6)
    other.load_state_dict(sampler.state_dict())
    for one in (sampler, other):
        step(one, a=0.9, b=0.2)
    assert (sampler.level[0], sampler.velocity[0]) == (
        other.level[0],
        other.velocity[0],
    ) and other.opened == 2
    assert sampler.pop_metrics()["sampler/share/c"] == 0.0


# ---- scores of hypotheses

TABLE = {"a": [5, 1, 0, 1], "b": [5, 1, 1, 1], "c": [5, 0, 0, 1]}
TABLE |= {"wrong": [6, 1, 1, 1], "few": [5, None, 1, None]}


def look_up(hypothesis, inputs):
    """Predict by a table: the observed input is 0, others are held out."""
    return [TABLE[hypothesis][i] for i in inputs]


def scored(score, *hypotheses):
    columns = {"observed": [[0, 5]], "held_out": [1, 2, 3]}
    prompt = Prompt("p", (Message("user", (Part("why"),)),), columns=columns)
    text = " ".join(f"<hypothesis>{name}</hypothesis>" for name in hypotheses)
    return AbductionScore(predict=f"{__name__}:look_up", score=score)([prompt], [Outcome(text=text)])[0]


def test_hypotheses_are_scored_without_a_right_one():
    # Vectors (1, 0, 1), (1, 1, 1) and (0, 0, 1) disagree on 1, 1 and 2 of three inputs: 4 of 9.
    assert scored("diversity", "a", "b", "c", "wrong") == pytest.approx(4 / 9)
    assert scored("consistency", "a", "b", "c", "wrong") == 0.75
    assert scored("generalizability", "a", "few", "wrong") == pytest.approx(4 / 6)
    assert [scored(name, "wrong") for name in ("consistency", "generalizability", "diversity")] == [0, 0, 0]
    assert scored("diversity", "a") == 0.0


def test_what_scores_need_is_named():
    with pytest.raises(ConfigError, match="`predict` must be package.module:function"):
        AbductionScore(predict="nowhere:f")
    with pytest.raises(ValueError, match="has no column 'held_out'"):
        bare = Prompt("p", (), columns={"observed": [[0, 5]]})
        AbductionScore(predict=f"{__name__}:look_up")([bare], [Outcome(text="")])
