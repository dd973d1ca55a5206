"""Answers that a window cut are asked for first, and each once."""

from __future__ import annotations

import json

import torch

from mmrl.core.rng import Stream
from mmrl.papers.t_ppo import BEGUN, WithUnfinished, zero_unfinished
from mmrl.samplers.uniform import Uniform
from tests.support.tables import assert_rows, reward_table
from tests.support.toys import prompts


def sampler_at(step):
    stream, data = Stream(0), prompts(num=6)
    stream.step = step
    return WithUnfinished(Uniform(data, stream=stream, shuffle=False), stream=stream, train_prompts=data)


def observed(sampler, marks=("yes", "", "yes")):
    """Show three answers of up to three tokens, to the prompts p0 to p2."""
    notes = {
        "token": [[5, 6, 7], [8, 9], [4]],
        "logp": [[-1, -2, -3], [-1, -1], [-0.5]],
        "entropy": [[1, 1, 1], [2, 2], [3]],
    }
    table = reward_table([0, 1, 0], length=[3, 2, 1], tags={"unfinished": [[mark] for mark in marks]})
    padded = {
        name: torch.tensor([row + [float("nan")] * (3 - len(row)) for row in rows], dtype=torch.float64)
        for name, rows in notes.items()
    }
    table = table.replace(uids=("p0", "p1", "p2"), notes=padded)
    sampler.observe((), table)


def test_the_rest_of_answers_comes_first_and_new_prompts_fill_the_step():
    sampler = sampler_at(0)
    assert [prompt.uid for prompt in sampler.draw(2, 2)] == ["p0", "p0", "p1", "p1"]
    observed(sampler)
    assert sampler.pop_metrics() == {"sampler/unfinished": 2.0}
    assert all(BEGUN not in prompt.columns for prompt in sampler.draw(1, 2)), "of this step: they wait"
    sampler.stream.step = 1
    asked = sampler.draw(2, 2)
    assert [prompt.uid for prompt in asked] == ["p0", "p2", "p3", "p3"]
    assert [prompt.columns[BEGUN]["token"].tolist() for prompt in asked[:2]] == [[5, 6, 7], [4]]
    assert BEGUN not in asked[2].columns and not sampler.waiting
    assert [prompt.uid for prompt in sampler.draw(1, 2)] == ["p4", "p4"]


def test_a_group_is_cut_where_the_step_is_full():
    sampler = sampler_at(0)
    observed(sampler, marks=("yes", "", ""))
    sampler.stream.step = 1
    assert [prompt.uid for prompt in sampler.draw(2, 2)] == ["p0", "p0", "p0", "p1"]


def test_unfinished_answers_are_restored():
    sampler, other = sampler_at(0), sampler_at(1)
    observed(sampler)
    state = sampler.state_dict()
    assert json.dumps(sorted(state["waiting"])) == '["0", "1"]'
    other.load_state_dict(state)
    assert [prompt.uid for prompt in other.draw(1, 2)] == ["p0", "p2"]


def test_zero_unfinished_leaves_what_goes_on_to_the_critic():
    table = reward_table([[1, 2], [3], [4]], tags={"unfinished": [["", "yes"], [""], ["yes"]]})
    assert_rows(zero_unfinished(table).values[:, 0], [[0, 0], [3], [0]])
    assert zero_unfinished(table).learn.equal(table.learn), "their steps are learned from"
    assert_rows(zero_unfinished(reward_table([1, 2])).values[:, 0], [[1], [2]])
