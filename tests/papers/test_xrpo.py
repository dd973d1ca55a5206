"""Prompts that failed are shown how similar ones were solved."""

from __future__ import annotations

import json

import pytest

from mmrl.advantages.bonus import capped_bonus
from mmrl.advantages.normalize import group_normalize
from mmrl.config.loading import ConfigError
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt, Trajectory
from mmrl.papers.xrpo import WithSolvedExamples, novelty, similarity
from mmrl.samplers.uniform import Uniform
from tests.support.tables import assert_rows, reward_table

QUESTIONS = {
    "red": "How many red balls are there?",
    "blue": "How many blue balls are there?",
    "cats": "How many cats are there?",
    "sky": "Is it raining?",
}


def asking(*uids, **options):
    prompts = [Prompt(uid=uid, messages=(Message("user", (Part(QUESTIONS[uid]),)),)) for uid in uids]
    return WithSolvedExamples(Uniform(prompts, stream=Stream(), shuffle=False), **options)


def answered(sampler, num, **rewards):
    """Ask the next prompts, two answers each, which earn their prompt's rewards; return what was asked."""
    drawn = sampler.draw(num, 2)
    rows, earned, seen = [], [], {}
    for prompt in drawn:
        i = seen[prompt.uid] = seen.get(prompt.uid, -1) + 1
        rows.append(Trajectory(prompt, prompt.uid, (Outcome(text=f"{prompt.uid} {i}"),), None, 1))
        earned.append(rewards[prompt.uid][i])
    sampler.observe(tuple(rows), reward_table(earned, group=[prompt.uid for prompt in drawn]))
    return {prompt.uid: prompt for prompt in drawn}


ROUND = {"red": (0, 0), "blue": (0, 1), "cats": (1, 1), "sky": (1, 0)}


def test_a_prompt_that_failed_is_shown_the_most_similar_solved_ones():
    # Of six words "blue" shares five, "cats" four of five, "sky" none.
    assert similarity(QUESTIONS["red"], QUESTIONS["blue"]) == pytest.approx(5 / 6)
    assert similarity(QUESTIONS["red"], QUESTIONS["cats"]) == pytest.approx(4 / 30**0.5)
    assert similarity(QUESTIONS["red"], QUESTIONS["sky"]) == similarity("", "") == 0
    sampler = asking("red", "blue", "cats", "sky")
    first = answered(sampler, 4, **ROUND)
    assert all(prompt.text == QUESTIONS[uid] for uid, prompt in first.items())
    again = answered(sampler, 4, **ROUND)
    assert again["red"].text.endswith(
        f"with right answers:\n{QUESTIONS['blue']}\nblue 1\n{QUESTIONS['cats']}\ncats 0"
    )
    assert again["red"].tags == {"hint": "solved"} and again["red"].uid == "red"
    assert all(not again[uid].tags for uid in ("blue", "cats", "sky"))
    assert sampler.pop_metrics() == {"examples/prompts": 1.0, "examples/solved": 3.0}


def test_a_prompt_that_was_solved_is_asked_plainly_and_becomes_an_example_without_examples():
    sampler = asking("red", "cats", examples=1)
    answered(sampler, 2, red=(0, 0), cats=(1, 1))
    assert answered(sampler, 2, red=(1, 0), cats=(0, 0))["red"].tags
    third = answered(sampler, 2, red=(1, 1), cats=(0, 0))
    assert not third["red"].tags
    assert third["cats"].text.endswith(f"{QUESTIONS['red']}\nred 0")


def test_without_a_solved_prompt_or_a_reward_nothing_is_shown():
    sampler = asking("red", "sky")
    answered(sampler, 2, red=(0, 0), sky=(None, None))
    assert not any(prompt.tags for prompt in answered(sampler, 2, red=(0, 0), sky=(None, None)).values())
    assert not sampler.solved and sampler.failed == {"red"}


def test_what_is_remembered_is_short_bounded_and_brought_back():
    sampler = asking("red", "blue", "cats", "sky", capacity=2, max_letters=3)
    answered(sampler, 4, **ROUND)
    assert list(sampler.solved) == ["cats", "sky"]
    fresh = asking("red", max_letters=3)
    fresh.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert fresh.draw(1, 1)[0].text.endswith("How\ncat\nIs \nsky")


def test_a_template_without_a_place_is_refused():
    with pytest.raises(ConfigError, match="'template' must contain {examples}"):
        asking("red", template="think again")


def test_novel_right_answers_have_a_bonus_of_at_most_half_their_advantage():
    logp = [[-0.2, -0.3, -0.1], [-1, -0.8], [-0.5] * 4, [-2, -1]]
    table = reward_table([1, 1, 0, 1], length=[3, 2, 4, 2], notes={"logp": logp})
    table = novelty(group_normalize(table, eps=1e-6))
    # means -.2 -.9 -.5 -1.5 about -.775
    assert_rows(table.scored["novelty"], [-0.777131, 0.117503, -0.316531, 0.515675])
    found = capped_bonus(table, of="novelty", coef=2.5, cap=0.5)
    assert_rows(found.values, [0.499999, 0.749999, -1.499997, 0.749999])
