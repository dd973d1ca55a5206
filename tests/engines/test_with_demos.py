"""Demonstrations inside the groups."""

from __future__ import annotations

import dataclasses

import pytest

from mmrl.advantages.shape import tempsamp_downscale
from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.engines.dataset_answers import WithDemos
from mmrl.training.collect import in_order
from mmrl.training.score import score
from tests.support.toys import ToyGenerate, ToyText, prompts


class Counting:
    """An engine that remembers what it was asked."""

    notes = frozenset({"logp"})

    def __init__(self, policy):
        self.policy, self.inner, self.asked = policy, ToyGenerate(policy, stream=Stream()), []

    def rollout(self, prompts):
        self.asked.append([prompt.uid for prompt in prompts])
        return self.inner.rollout(prompts)


def asked(num=2, times=4, answers=1):
    return [prompt for prompt in prompts(num=num, answers=answers) for _ in range(times)]


def test_the_last_rollouts_of_every_prompt_are_its_recorded_answers():
    engine = Counting(ToyText())
    rollouts = in_order(WithDemos(engine, per_group=1).rollout(asked()), ["p0", "p1"])
    assert [row.prompt.uid for row in rollouts] == ["p0"] * 4 + ["p1"] * 4
    assert [row.on_policy for row in rollouts] == [True, True, True, False] * 2
    assert [rollouts[i].outcomes[-1].text for i in (3, 7)] == ["1 1", "2 2"]
    assert [row.group for row in rollouts] == ["p0"] * 4 + ["p1"] * 4


def test_replaced_rollouts_are_never_generated():
    engine = Counting(ToyText())
    WithDemos(engine, per_group=3).rollout(asked())
    assert engine.asked == [["p0", "p1"]]


def test_a_prompt_without_answers_keeps_all_its_rollouts():
    bare = dataclasses.replace(prompts(num=2)[1], answers=())
    rollouts = WithDemos(Counting(ToyText())).rollout([prompts(num=1)[0]] * 2 + [bare] * 2)
    assert [row.prompt.uid for row in rollouts if not row.on_policy] == ["p0"]
    assert [row.prompt.uid for row in rollouts if row.on_policy] == ["p0", "p1", "p1"]


def test_several_demonstrations_take_the_answers_in_turn():
    several = dataclasses.replace(
        prompts(num=1)[0], answers=prompts(num=2)[0].answers + prompts(num=2)[1].answers
    )
    rollouts = WithDemos(Counting(ToyText()), per_group=3).rollout([several] * 4)
    assert [row.outcomes[-1].text for row in rollouts[1:]] == ["1 1", "2 2", "1 1"]


def test_where_everything_is_shown_nothing_is_asked():
    engine = Counting(ToyText())
    rollouts = WithDemos(engine, per_group=9).rollout(asked(times=2))
    assert engine.asked == []
    assert len(rollouts) == 4
    assert not any(row.on_policy for row in rollouts)


def test_prompts_may_stand_mixed():
    rollouts = WithDemos(Counting(ToyText())).rollout([p for p in prompts(num=2)] * 2)
    assert sorted((row.prompt.uid, row.on_policy) for row in rollouts) == [
        ("p0", False),
        ("p0", True),
        ("p1", False),
        ("p1", True),
    ]


def test_the_chain_sees_which_rows_were_demonstrations():
    rollouts = WithDemos(Counting(ToyText())).rollout(asked(num=1, times=3))
    reward = Pieces(Stream()).make("reward", Piece("tests.support.toys:share_right"))
    table = score([reward], rollouts)
    assert table.ids["on_policy"][:, 0].tolist() == [1, 1, 0]
    assert tempsamp_downscale(table, of="share_right").values[2] == 0.8


def test_fewer_than_one_demonstration_is_refused():
    with pytest.raises(ConfigError, match="'engine.per_group' must be at least 1, not 0"):
        Pieces(Stream()).check("engine", Piece("with_demos", {"per_group": 0}), "engine")
