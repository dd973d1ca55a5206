"""Prompts that are asked again with one of their own answers: a wrong one, or the best one."""

from __future__ import annotations

import pytest

from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Trajectory
from mmrl.papers.r3 import WithReflection, entropy_rank
from mmrl.samplers.uniform import Uniform
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import prompts


def reflecting(num=1, **options):
    return WithReflection(Uniform(prompts(num=num), stream=Stream(), shuffle=False), **options)


def answered(sampler, *answers):
    """Ask the next prompt, give it answers with rewards, and return what was asked."""
    (*_, prompt) = sampler.draw(1, len(answers))
    rows = tuple(Trajectory(prompt, prompt.uid, (Outcome(text=text),), None, 1) for text, _ in answers)
    table = reward_table([reward for _, reward in answers], group=[prompt.uid] * len(answers))
    sampler.observe(rows, table)
    return prompt


def test_the_newest_wrong_answer_is_shown_while_the_mean_is_low():
    sampler = reflecting(threshold=0.5, window=4)
    assert answered(sampler, ("a", 0.0), ("b", 0.4), ("c", 1.0)).text == "say 1"  # mean 0.4667
    shown = answered(sampler, ("d", 1.0), ("e", 1.0))
    assert "was wrong:\nb\nFind its mistake" in shown.text and shown.tags == {"hint": "wrong"}
    assert shown.uid == "p0" and sampler.pop_metrics() == {"reflection/prompts": 1.0}
    # The newest four are 0.4, 1, 1, 1: a mean of 0.85.
    assert sampler.known["p0"].mean == 0.85
    assert answered(sampler, ("f", 1.0)).text == "say 1" and sampler.pop_metrics() == {
        "reflection/prompts": 0.0
    }


def test_the_best_answer_so_far_is_a_hint():
    sampler = reflecting(show="best", threshold=1.0, max_letters=3, template=" Known: {answer}.")
    answered(sampler, ("bad", 0.0), ("better", 0.5), ("as good", 0.5))
    assert answered(sampler, ("worse", 0.1)).text == "say 1\n Known: bet."
    answered(sampler, ("new", 0.6))
    assert "new" in answered(sampler, ("x", 0.0)).text


def test_a_prompt_without_a_wrong_answer_or_a_reward_stays_plain():
    sampler = reflecting(of="reward", threshold=0.5)
    answered(sampler, ("a", None), ("b", None))
    assert not sampler.known and answered(sampler, ("c", 0.5)).text == "say 1"
    assert answered(sampler, ("d", 0.5)).text == "say 1"


def test_what_is_remembered_is_brought_back():
    sampler = reflecting()
    answered(sampler, ("a", 0.0))
    fresh = reflecting()
    fresh.load_state_dict(sampler.state_dict())
    assert fresh.known == sampler.known and "a" in fresh.draw(1, 1)[0].text


def test_a_template_without_a_place_is_refused():
    with pytest.raises(ConfigError, match="'template' must contain {answer}"):
        reflecting(template="think again")


def cut(entropy, rewards=None, **options):
    rewards = rewards or [0] * len(entropy)
    finish = ["length"] * len(entropy)
    table = reward_table(
        rewards, length=[len(row) for row in entropy], notes={"entropy": entropy}, tags={"finish": finish}
    )
    return entropy_rank(table, of="reward", max_reward=1.0, **options).values


ENTROPIES = [[2, 0.1, 0.1, 0.1, 0.2], [1.5, 1.4, 0.2, 0.1], [1, 0.9, 0.8, 0.9, 1, 0.8], [0.5, 0.4, 0.6]]


def test_cut_answers_of_a_failed_group_are_ranked_by_peak_and_mean_entropy():
    # peaks 1.1 1.5 1 .6, means .5 .8 .9 .5: 1 1 0 0 are beaten
    assert_rows(cut(ENTROPIES, share=0.4), [5 / 6, 5 / 6, 1 / 6, 1 / 6])
    # peaks 1.5 1.1 1 .95 of one step each, means .3 .5 .9 .95
    steps = [[1.5, *[0.0] * 4], [1.1, 0.5, 0.2, 0.2], [1.0, 0.8], [0.95] * 3]
    assert_rows(cut(steps, share=0.2), [1, 2 / 3, 1 / 3, 0])


def test_answers_that_are_alone_or_not_cut_or_have_a_right_one_beside_them_are_not_ranked():
    assert_rows(cut([[2.0]]), [0])
    assert_rows(cut(ENTROPIES, [1, 0, 0, 0]), [1, 0, 0, 0])
    table = reward_table([0, 0], notes={"entropy": [[2.0], [1.0]]}, tags={"finish": ["stop", "stop"]})
    assert_rows(entropy_rank(table, of="reward").values, [0, 0])
