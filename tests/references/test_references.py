"""Policies to stay near: frozen, and moving averages."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import ConfigError, Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome
from mmrl.references import ema, frozen, trained
from tests.support.toys import ToyText, prompts


def policy_of(value):
    policy = ToyText(num=2, length=2, vocab=3)
    policy.table.data[..., 1] = value
    return policy


def batch_of(policy):
    return policy.collate((policy.encode(prompts(num=1)[0], Outcome(text="1")),))


def test_frozen_answers_as_the_policy_did_when_it_was_made():
    policy = policy_of(1.0)
    reference, before = frozen(policy), policy(batch_of(policy)).logp.detach()
    policy.table.data[..., 1] = 5.0
    reference.update()
    assert reference(batch_of(policy)).logp.equal(before)
    assert not policy(batch_of(policy)).logp.equal(before)


def test_ema_keeps_decay_of_itself_after_every_step():
    policy = policy_of(1.0)
    reference = ema(policy, decay=0.9)
    policy.table.data[..., 1] = 11.0
    reference.update()
    # .9 * 1 + .1 * 11 = 2, then .9 * 2 + 1.1
    assert reference.weights["table"][0, 0, 1] == pytest.approx(2.0)
    reference.update()
    assert reference.weights["table"][0, 0, 1] == pytest.approx(2.9)
    assert policy.table[0, 0, 1] == 11.0


def test_a_decay_of_0_is_the_policy_itself():
    policy = policy_of(1.0)
    reference = ema(policy, decay=0.0)
    policy.table.data[..., 1] = 4.0
    reference.update()
    assert reference.weights["table"].equal(policy.table.data)


def test_a_reference_answers_without_gradient_and_gives_the_weights_back():
    policy = policy_of(1.0)
    reference = frozen(policy)
    policy.table.data[..., 1] = 5.0
    assert not reference(batch_of(policy)).logp.requires_grad
    assert policy.table[0, 0, 1] == 5.0
    assert policy(batch_of(policy)).logp.requires_grad


def test_weights_are_given_back_after_an_error():
    policy = policy_of(1.0)
    reference = frozen(policy)
    policy.table.data[..., 1] = 5.0
    with pytest.raises(RuntimeError), reference.rollout_weights():
        assert policy.table[0, 0, 1] == 1.0
        raise RuntimeError
    assert policy.table[0, 0, 1] == 5.0


def test_extras_are_those_of_the_lent_weights():
    policy = policy_of(0.0)
    reference = frozen(policy)
    policy.table.data[..., 1] = 50.0
    uncertain = reference(batch_of(policy), frozenset({"entropy"})).extra["entropy"]
    torch.testing.assert_close(uncertain, torch.full((1, 2), 3.0).log())


def test_only_what_learns_is_held():
    policy = policy_of(1.0)
    policy.module.register_parameter("fixed", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    assert set(trained(policy)) == {"table"}
    assert set(frozen(policy).weights) == {"table"}


def test_a_saved_reference_is_taken_up_in_place():
    policy = policy_of(1.0)
    moved, resumed = ema(policy, decay=0.5), ema(policy, decay=0.5)
    policy.table.data[..., 1] = 3.0
    moved.update()
    resumed.load_state_dict(moved.state_dict())
    moved.update()
    assert resumed.weights["table"][0, 0, 1] == 2.0, "it holds a copy, not what it was loaded from"


def test_ema_moves_every_so_many_steps():
    policy = policy_of(0.0)
    average = ema(policy, decay=0.5, every=3)
    policy.table.data[..., 1] = 8.0
    found = []
    for _ in range(7):
        average.update()
        found.append(average.weights["table"][0, 0, 1].item())
    # after the third and the sixth step: 0.5 * 8, and 0.5 * 4 + 0.5 * 8
    assert found == [0, 0, 4, 4, 4, 6, 6]
    with pytest.raises(ConfigError, match="'reference.every' must be at least 1"):
        Pieces(Stream()).check("reference", Piece("ema", {"every": 0}), "reference")


def test_a_resumed_average_moves_at_the_step_at_which_it_would_have():
    policy = policy_of(0.0)
    average, resumed = ema(policy, decay=0.5, every=3), ema(policy, decay=0.5, every=3)
    policy.table.data[..., 1] = 8.0
    average.update()
    average.update()
    resumed.load_state_dict(average.state_dict())
    resumed.update()
    assert resumed.weights["table"][0, 0, 1] == 4.0


def test_a_decay_that_follows_a_schedule_changes_when_the_clock_ticks():
    from mmrl.core.types import Clock

    pieces, policy = Pieces(Stream()), policy_of(0.0)
    decay = {"name": "linear", "start": 0.0, "end": 0.3, "steps": 300}  # AWM
    average = pieces.make("reference", Piece("ema", {"decay": decay}), policy)
    pieces.tick(Clock(100))
    assert average.decay == pytest.approx(0.1)
    policy.table.data[..., 1] = 10.0
    average.update()
    assert average.weights["table"][0, 0, 1] == pytest.approx(9.0)
