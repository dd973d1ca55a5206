"""Budgets of rollouts: the worked numbers of V_0, V_0.5 and XRPO, and draws with uneven groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mmrl.config.schema import ConfigError
from mmrl.core.rng import Stream
from mmrl.samplers.allocate import (
    Allocate,
    half_width,
    of_baseline,
    of_interval,
    student_quantile,
    utility,
)
from mmrl.samplers.prior_value import PriorValue
from mmrl.samplers.uniform import Uniform
from mmrl.training.loop import train
from tests.support.observing import observe, uids
from tests.support.toys import prompts, toy_run

pytestmark = pytest.mark.usefixtures("no_page")


def allocating(num=3, *, columns=(), **options):
    data = prompts(num=num)
    if columns:
        data = [replace(prompt, columns={"rate": rate}) for prompt, rate in zip(data, columns, strict=True)]
        options = {"prior_column": "rate", **options}
    return Allocate(Uniform(data, stream=Stream(), shuffle=False), **options)


def counts(sampler, num_prompts, num_generations):
    return dict(Counter(uids(sampler.draw(num_prompts, num_generations))))


def test_the_utility_of_v0():
    found = [utility(8, rate) for rate in (0.1, 0.3, 0.5, 0.9)]
    assert found == pytest.approx([3.756262, 5.138816, 3.968750, 0.800000], abs=1e-6)
    assert utility(1, 0.3) == utility(8, 0.0) == 0.0


def test_the_greedy_budget_of_v0():
    sampler = allocating(columns=[0.9, 0.5, 0.1])
    assert counts(sampler, 3, 4) == {"p0": 2, "p1": 8, "p2": 2}


def test_no_prompt_gets_more_than_the_most():
    assert counts(allocating(columns=[0.9, 0.5, 0.1], at_most=5), 3, 4) == {"p0": 2, "p1": 5, "p2": 5}
    assert counts(allocating(columns=[0.9, 0.5, 0.1], at_most=3), 3, 4) == {"p0": 3, "p1": 3, "p2": 3}


def test_equal_prompts_share_evenly():
    # At 1/2 a further rollout gains 5/8 twice, then less.
    assert sorted(counts(allocating(), 3, 4).values()) == [4, 4, 4]


def known(rewards, prior=0.6):
    value = PriorValue("rate")
    value.add("p0", [(reward + 1) / 2 for reward in rewards])
    return value, replace(prompts()[0], columns={"rate": prior})


def test_the_bias_and_the_gain_of_v05():
    # A prior value of .2 from -1 to 1 is a pass rate of .6.
    value, prompt = known([1, -1, -1, -1])
    assert value.bias(prompt) == pytest.approx(0.24)
    assert of_baseline(value, prompt, 4, 0, 0.0) == pytest.approx(0.013358, abs=1e-6)
    value, prompt = known([1, -1, 1, -1])
    assert value.bias(prompt) == 0.0 == of_baseline(value, prompt, 4, 0, 0.0)


def test_v05_buys_rollouts_only_while_they_pay():
    sampler = allocating(columns=[0.6, 0.6, 0.6], rule="v05", at_least=4, at_most=16)
    assert counts(sampler, 3, 16) == {"p0": 4, "p1": 4, "p2": 4}, "nothing contradicts the prior"
    observe(sampler, {"p0": [1.0, 0.0, 0.0, 0.0], "p1": [1.0, 0.0, 1.0, 0.0]})
    # .24 / (.24 n + 1) - .24 / (.24 (n + 1) + 1) is .0047 at n = 10, .0041 at 11 and .0036 at 12.
    assert counts(sampler, 3, 16) == {"p0": 12, "p1": 4, "p2": 4}


def test_the_intervals_and_the_priority_of_xrpo():
    value = PriorValue()
    value.add("p0", [1.0, 0.0, 1.0, 0.0])
    prompt = prompts()[0]
    spread = value.spread(prompt)
    assert spread == pytest.approx(0.577350, abs=1e-6)
    assert [half_width(spread, n) for n in (4, 5)] == pytest.approx([0.918693, 0.716875], abs=1e-6)
    assert of_interval(value, prompt, 4, 32, 0.0) == pytest.approx(0.201818, abs=1e-6)
    assert of_interval(value, prompt, 4, 32, 0.5) == pytest.approx(0.669292, abs=1e-6)


def test_quantiles_of_student():
    found = [student_quantile(freedom) for freedom in (1, 2, 3, 4, 30, 127)]
    assert found == pytest.approx([12.706205, 4.302653, 3.182446, 2.776445, 2.042272, 1.978820], abs=2e-6)


def test_xrpo_gives_to_prompts_that_vary():
    sampler = allocating(rule="xrpo", exploration=0.0)
    observe(sampler, {"p0": [1.0] * 4, "p1": [1.0, 0.0, 1.0, 0.0], "p2": [0.0] * 4})
    assert counts(sampler, 3, 4) == {"p0": 2, "p1": 8, "p2": 2}
    sampler.exploration = 50.0
    assert counts(sampler, 3, 4) == {"p0": 4, "p1": 4, "p2": 4}, "the bonus shares evenly"


def test_pass_rates_are_shrunk_to_beta_1_1():
    value, prompt = PriorValue(), prompts()[0]
    assert value.rate(prompt) == 0.5
    value.add("p0", [1.0, 1.0, 0.0])
    assert value.rate(prompt) == pytest.approx(3 / 5)
    assert PriorValue("rate", 0.0).rate(replace(prompt, columns={"rate": 0.3})) == 0.3


def test_only_own_rollouts_with_a_reward_count():
    sampler = allocating()
    observe(sampler, {"p0": [1.0, 0.0, None], "p1": [3.0]}, on_policy=[True, False, True, True])
    assert sampler.value.sums == {"p0": (1.0, 1.0, 1.0), "p1": (1.0, 1.0, 1.0)}


def test_too_small_a_budget_and_a_missing_prior_are_refused():
    with pytest.raises(ConfigError, match="6 rollouts are too few for 3 prompts with `at_least` 4 each"):
        allocating(at_least=4).draw(3, 2)
    with pytest.raises(
        ConfigError, match="'p0' needs a number from 0 to 1 in the column 'rate'.*it has None"
    ):
        allocating(prior_column="rate").draw(3, 4)


def test_a_run_learns_from_uneven_groups(tmp_path):
    sampler = [{"name": "uniform", "shuffle": False}, {"name": "allocate", "rule": "v0", "of": "share_right"}]
    run = toy_run(tmp_path, sampler=sampler, rollout={"num_prompts": 4, "num_generations": 6}, max_steps=4)
    train(run)
    last = run.journal.read()[-1]
    assert last["sampler/rollouts_min"] == 2.0 < last["sampler/rollouts_max"]
    assert sum(run.method.sampler.given.values()) == 24
