"""The sampler that walks every prompt once per epoch."""

from __future__ import annotations

from mmrl.core.rng import Stream
from mmrl.samplers.uniform import Uniform
from tests.support.toys import prompts


def uids(drawn):
    return [prompt.uid for prompt in drawn]


def sampler(num=5, seed=0, **options):
    return Uniform(prompts(num=num), stream=Stream(seed), **options)


def test_every_prompt_is_drawn_once_per_epoch():
    draws = sampler(num=6)
    epochs = [uids(draws.draw(2, 1)) + uids(draws.draw(4, 1)) for _ in range(3)]
    assert all(sorted(epoch) == [f"p{i}" for i in range(6)] for epoch in epochs)
    assert epochs[0] != epochs[1], "every epoch has an order of its own"


def test_each_prompt_is_named_once_per_rollout_wanted():
    drawn = uids(sampler(shuffle=False).draw(2, 3))
    assert drawn == ["p0"] * 3 + ["p1"] * 3


def test_without_shuffling_prompts_come_as_they_stand_and_begin_anew():
    draws = sampler(num=3, shuffle=False)
    assert [uids(draws.draw(2, 1)) for _ in range(3)] == [["p0", "p1"], ["p2", "p0"], ["p1", "p2"]]


def test_no_prompt_comes_twice_in_one_draw_where_an_epoch_ends_inside_it():
    draws = sampler(num=5)
    for _ in range(40):
        drawn = uids(draws.draw(3, 1))
        assert len(drawn) == len(set(drawn)) == 3


def test_a_draw_is_no_larger_than_the_data():
    assert sorted(uids(sampler(num=3).draw(10, 1))) == ["p0", "p1", "p2"]


def test_nothing_is_drawn_where_nothing_is_missing():
    assert sampler().draw(0, 4) == []


def test_the_order_follows_from_the_seed_and_not_from_the_moment():
    first, again, other = sampler(num=20), sampler(num=20), sampler(num=20, seed=1)
    again.stream.step, again.stream.round = 7, 3
    drawn = uids(first.draw(20, 1))
    assert drawn == uids(again.draw(20, 1))
    assert drawn != uids(other.draw(20, 1))


def test_a_saved_sampler_goes_on_where_it_stood():
    first, resumed = sampler(), sampler()
    first.draw(3, 1)
    resumed.load_state_dict(first.state_dict())
    assert [uids(first.draw(2, 1)) for _ in range(5)] == [uids(resumed.draw(2, 1)) for _ in range(5)]
