"""LLDS: lost likelihood of good answers, by worked numbers."""

from __future__ import annotations

import pytest
import torch

from mmrl.papers.llds import lost_likelihood
from tests.support.tables import assert_rows, slope_of, step_table


def fallen(*falls, advantage=0.0, mask=None):
    """Build rows whose log-probabilities fell by so much since they were sampled."""
    new = [[-1.0] * len(row) for row in falls]
    old = [[-1.0 + fall for fall in row] for row in falls]
    return step_table(new, advantage=[advantage] * len(falls), mask=mask, old=old)


def test_llds_counts_losses_where_an_action_as_a_whole_became_rarer():
    # .2, -.1, .05 sum to .15 and .2 + .05 are lost; -.3, .1 sum to -.2: .2 * .25 / 5. A tool answered between
    new, batch = fallen([0.2, -0.1, 0.05, 9.0, -0.3, 0.1], mask=[[1, 1, 1, 0, 1, 1]])
    loss = lost_likelihood(new, batch)
    assert_rows(loss, [[0.04, 0, 0.01, 0, 0, 0]])
    assert_rows((loss.sum() / batch.mask.sum())[None], [0.01])
    assert_rows(slope_of(loss, new), [[-0.2, 0, -0.2, 0, 0, 0]])
    # the whole answer became likelier by .05
    assert not lost_likelihood(new, batch, gate="response").any()


def test_llds_may_gate_whole_responses():
    # .15 - .1 + .1: all four losses count, .2 * (.2 + .05 + .1) / 5
    new, batch = fallen([0.2, -0.1, 0.05, 9.0, -0.1, 0.1], mask=[[1, 1, 1, 0, 1, 1]])
    loss = lost_likelihood(new, batch, gate="response")
    assert_rows((loss.sum() / batch.mask.sum())[None], [0.014])


def test_llds_may_weigh_the_final_answer_less():
    # .2 * (.2 + .05), and .05 * (.1 + .3) for the answer; a weight above that of all counts as that
    new, batch = fallen([0.2, 0.05, 0.1, 0.3])
    answer = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    batch = batch.replace(notes={"answer": answer})
    assert_rows(lost_likelihood(new, batch, answer_coef=0.05), [[0.04, 0.01, 0.005, 0.015]])
    assert_rows(lost_likelihood(new, batch, answer_coef=0.0), [[0.04, 0.01, 0, 0]])
    assert_rows(lost_likelihood(new, batch, answer_coef=9.0), [[0.04, 0.01, 0.02, 0.06]])
    with pytest.raises(ValueError, match="add the engine `vision.with_answer_region`"):
        lost_likelihood(new, batch.replace(notes={}), answer_coef=0.05)


def test_llds_leaves_answers_below_their_group_and_likelier_ones_alone():
    assert not lost_likelihood(*fallen([0.2, 0.1], advantage=-0.5)).any()
    assert not lost_likelihood(*fallen([-0.2, 0.0], advantage=1.0)).any()
    assert_rows(lost_likelihood(*fallen([0.3], [-0.1, 0.2], advantage=1.0)), [[0.06], [0, 0.04]])
    # with advantages of steps, a bad one parts the chunks: .2 - .3 is not lost as a whole, .1 is
    new, batch = step_table([[-1.0] * 4], advantage=[[1, 1, -1, 1]], old=[[-0.8, -1.3, -0.1, -0.9]])
    assert_rows(lost_likelihood(new, batch, coef=1.0), [[0, 0, 0, 0.1]])
