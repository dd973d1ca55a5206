"""Moving credit between the outcomes of a row, and laying it over the steps."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import batch_normalize, group_center
from mmrl.advantages.select import increments, per_step, returns
from mmrl.advantages.shape import total
from mmrl.core.reward_table import ABSENT
from tests.support.tables import assert_rows, prefix_rewards, reward_table


def test_per_step_gives_a_step_the_first_outcome_that_ends_after_it():
    # ends 2 and 3 of 5 steps: steps 0 1 see the first, step 2 the second, and 3 4 stand behind the last end
    table = per_step(reward_table([[10, 20], [30]], ends=[[2, 3], [2]], length=[5, 2]))
    assert_rows(table.values[:, 0], [[10, 10, 20, 20, 20], [30, 30]])
    assert table.ends.tolist() == [[1, 2, 3, 4, 5], [1, 2, *[ABSENT] * 3]]
    assert table.valid[:, 0].tolist() == [[True] * 5, [True, True, False, False, False]]


def test_per_step_of_several_outcomes_with_one_end_takes_the_first():
    table = per_step(reward_table([[1, 2, 3]], ends=[[2, 2, 4]]))
    assert_rows(table.values[:, 0], [[1, 1, 3, 3]])


def test_per_step_keeps_what_is_not_learned_and_what_does_not_apply():
    table = reward_table([[1, None], [3, 4]], ends=[[1, 2], [1, 2]])
    table = per_step(table.replace(learn=torch.tensor([[True, True], [False, True]])))
    assert table.valid[:, 0].tolist() == [[True, False], [True, True]]
    assert table.learn.tolist() == [[True, True], [False, True]]


def test_per_step_carries_the_ids_and_measured_rewards_of_each_place():
    table = reward_table({"a": [[1, 2]]}, ends=[[1, 3]], tags={"turn": [["one", "two"]]})
    stretched = per_step(table)
    one, two = table.ids["turn"][0].tolist()
    assert stretched.ids["turn"].tolist() == [[one, two, two]]
    assert stretched.scored["a"].tolist() == [[1, 2, 2]]
    assert stretched.ids["place"].tolist() == [[0, 1, 2]]


def test_returns_add_up_what_follows():
    # backwards: 4, 2 + 4/2, 8 + 4/2
    table = returns(reward_table([[8, 2, 4]]), gamma=0.5)
    assert_rows(table.values[:, 0], [[10, 4, 4]])


def test_undiscounted_returns_begin_with_the_sum():
    assert_rows(returns(reward_table([[8, 2, 4], [1, 1]])).values[:, 0], [[14, 6, 4], [2, 1]])


def test_returns_reach_places_to_which_the_reward_does_not_apply():
    table = returns(reward_table([[None, 2], [None, None], [5]]))
    assert_rows(table.values[:, 0], [[2, 2], [0, 0], [5]])
    # a row with no reward at all, such as one of a faulty group, must not enter statistics as 0
    assert table.valid[:, 0].tolist() == [[True, True], [False, False], [True, False]]


def test_returns_of_steps_leave_out_those_that_the_policy_did_not_choose():
    # rewards 1, hole, 1, 1: returns 3, -, 2, 1
    table = reward_table([1], length=[4], notes={"logp": [[-1.0, None, -1.0, -1.0]]})
    found = returns(per_step(table))
    assert found.valid[0, 0].tolist() == [True, False, True, True]
    assert_rows(found.values[:, 0][found.valid[:, 0]][:, None], [[3], [2], [1]])
    # an outcome that ends in a hole, such as the reply of a tool, keeps its return
    table = reward_table([[1, 1]], ends=[[2, 4]], notes={"logp": [[-1.0, None, -1.0, -1.0]]})
    assert returns(table).valid.all()


def test_increments_credit_each_stretch_with_what_it_gained():
    # rewards .5 .4 .45 .6 after 0 .. 3 steps
    table = increments(prefix_rewards([0.5, 0.4, 0.45, 0.6]))
    assert_rows(table.values[:, 0], [[-0.1, 0.05, 0.15]])
    assert table.ends.tolist() == [[1, 2, 3]]


def test_increments_of_ragged_rows_end_with_their_row():
    table = increments(prefix_rewards([0, 1, 3], [2, 7]))
    assert_rows(table.values[:, 0], [[1, 2], [5]])
    assert table.valid[:, 0].tolist() == [[True, True], [True, False]]
    assert table.ends.tolist() == [[1, 2], [1, ABSENT]]


def test_an_increment_is_unknown_where_one_of_its_ends_is():
    table = increments(reward_table([[1, None, 4, 6]], ends=[[0, 1, 2, 3]]))
    assert table.valid[:, 0].tolist() == [[False, False, True]]
    assert table.values[0, 0, 2] == 2


def test_a_row_with_one_outcome_has_no_increment():
    table = increments(prefix_rewards([1, 2], [3]))
    assert table.valid[:, 0].tolist() == [[True], [False]]


def test_returns_undo_increments():
    table = returns(increments(prefix_rewards([0.5, 0.4, 0.45, 0.6])))
    # what is left to gain: .6 less what was there
    assert_rows(table.values[:, 0], [[0.1, 0.2, 0.15]])


def test_reinforce_pp_whitens_the_reward_over_steps_without_comparing_groups():
    # steps 1 0 0 0: mean 1/4, deviation 1/2
    table = batch_normalize(per_step(total(reward_table([1, 0], length=[1, 3]))), eps=0.0)
    assert_rows(table.values[:, 0], [[1.5], [-0.5, -0.5, -0.5]])


def test_after_per_step_groups_compare_equal_steps():
    table = group_center(per_step(reward_table([2, 0, 4], length=[2, 1, 2])))
    # step 0: 2 0 4, step 1: 2 4
    assert_rows(table.values[:, 0], [[0, -1], [-2], [2, 1]])
