"""SPAE: steps that change the potential of an answer."""

from __future__ import annotations

import math
from functools import partial

import torch

from mmrl.advantages.normalize import batch_normalize, group_center
from mmrl.papers.spae import only_answers, step_potential
from tests.support.tables import assert_rows, reward_table


def test_only_answers_are_compared_with_each_other():
    table = reward_table([[0.2, 0.4, 1], [0.9, 0]], group="aa", ends=[[1, 2, 4], [2, 4]])
    assert_rows(only_answers(table).valid[:, 0].double(), [[0, 0, 1], [0, 1]])
    centred = group_center(only_answers(table), by=("group",)).values[:, 0]
    assert_rows(torch.stack([centred[0, 2], centred[1, 1]]), [0.5, -0.5])


ACC, CONF = [0.1, 0.4, 0.95, 0.98], [0.6, 0.7, 0.9, 0.95]


def probed(acc, conf, advantage=0.5):
    labels = {"answer_probability": [acc], "confidence": [conf]}
    rewards = {"reward": [[None] * (len(acc) - 1) + [advantage]], **labels}
    return reward_table(rewards, weights=dict.fromkeys(labels, 0.0))


spae = partial(step_potential, of="answer_probability", confidence="confidence")


def test_spae_damps_and_credits_steps():
    table = spae(probed(ACC, CONF), threshold=0.5)
    assert_rows(table.values[:, 0], [[0.211750, 0.461651, 1.070891, 0.097679]])
    standardised = batch_normalize(table, eps=0.0).values * math.sqrt(4 / 3)  # over 4 where it is over 3
    assert_rows(standardised[:, 0], [[-0.661204, 0.003079, 1.622549, -0.964424]], tolerance=1e-5)
    later = batch_normalize(spae(probed(ACC, CONF)), eps=0.0).values * math.sqrt(4 / 3)
    assert_rows(later[:, 0], [[-0.840774, -0.111858, 1.665183, -0.712552]], tolerance=1e-5)


def test_spae_without_its_options_is_the_advantage_of_the_answer():
    table = spae(probed(ACC, CONF), alpha=0.0, xi=0.0)
    assert_rows(table.values[:, 0], [[0.5] * 4])


def test_spae_of_equal_changes_or_none_adds_nothing():
    flat = spae(probed([0.2] * 3, [0.5] * 3))
    assert_rows(flat.values[:, 0], [[0.5] * 3])
    # Behind the last probe a step is damped, and has no change: C = 1 there.
    tail = spae(probed([0.2, 0.99, None], [0.5, 0.99, None]), xi=0.0)
    assert_rows(tail.values[:, 0], [[0.5, 0.5, 0.5 * (1 - 0.5 * (1 - math.exp(-1)))]])
    bonus = spae(probed([0.2, 0.99, None], [0.5, 0.99, None]), alpha=0.0).values[0, 0]
    assert bonus[2] == 0.5 and torch.isclose(bonus[:2].mean(), torch.tensor(0.5).double())
