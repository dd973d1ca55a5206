"""Recorded answers as rollouts."""

from __future__ import annotations

import dataclasses

import pytest

from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.engines.dataset_answers import Offline
from tests.support.toys import ToyText, prompts


def recorded(*texts):
    answers = tuple(Outcome(text=text, recorded={"clip": float(i)}) for i, text in enumerate(texts))
    return dataclasses.replace(prompts(num=1)[0], answers=answers)


def stored(**options):
    return Offline(ToyText(), stream=Stream(), **options)


def texts(rollouts):
    return [row.outcomes[-1].text for row in rollouts]


def test_answers_are_read_in_order_and_begin_anew_after_the_last():
    rollouts = stored().rollout([recorded("1", "2 2")] * 3)
    assert texts(rollouts) == ["1", "2 2", "1"]


def test_each_prompt_counts_for_itself_in_the_order_asked():
    a, b = (dataclasses.replace(recorded("1", "2"), uid=uid) for uid in ("p0", "p1"))
    rollouts = stored().rollout([a, b, a, b])
    assert texts(rollouts) == ["1", "1", "2", "2"]
    assert [row.group for row in rollouts] == ["p0", "p1", "p0", "p1"]


def test_rows_are_off_policy_and_keep_what_was_recorded():
    (row,) = stored().rollout([recorded("3 3")])
    assert not row.on_policy
    assert row.outcomes[-1].recorded == {"clip": 0.0}
    # two tokens and the end
    assert row.length == row.outcomes[-1].end == 3


def test_every_call_begins_with_the_first_answer():
    engine = stored()
    assert [texts(engine.rollout([recorded("1", "2")])) for _ in range(2)] == [["1"], ["1"]]


def test_a_prompt_without_answers_is_named():
    with pytest.raises(ValueError, match="prompt 'p0' has no recorded answers"):
        stored().rollout([recorded()])


def test_shuffled_answers_are_others_in_every_collection_and_none_twice_before_all_were_read():
    engine = stored(shuffle=True)
    prompt = recorded("1", "2", "3", "4", "5")
    seen = []
    for step in range(8):
        engine.stream.step = step
        seen.append(tuple(texts(engine.rollout([prompt] * 5))))
        assert sorted(seen[-1]) == ["1", "2", "3", "4", "5"]
        assert seen[-1] == tuple(texts(engine.rollout([prompt] * 5))), "one collection, one order"
    assert len(set(seen)) > 4
