"""What is left out: silenced steps stay in the denominators, dropped rows do not."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import batch_normalize, group_center, group_normalize
from mmrl.advantages.select import drop_truncated, drop_zero, high_entropy, per_step
from tests.support.tables import assert_rows, reward_table


def test_high_entropy_silences_all_but_the_top_share_of_the_collection():
    # ten steps of entropy 0 .. 9: a share of .2 keeps 8 and 9, wherever they stand
    table = reward_table([1, -1], length=[5, 5], notes={"entropy": [[0, 9, 2, 3, 4], [5, 6, 7, 8, 1]]})
    kept = high_entropy(table, top=0.2)
    assert_rows(kept.values[:, 0], [[0, 1, 0, 0, 0], [0, 0, 0, -1, 0]])
    assert kept.learn.all(), "silenced steps are still counted"


def test_steps_at_the_bar_are_kept():
    table = reward_table([1], length=[4], notes={"entropy": [[2, 2, 2, 2]]})
    assert_rows(high_entropy(table, top=0.25).values[:, 0], [[1, 1, 1, 1]])


def test_padding_is_not_ranked_and_rows_may_be_ragged():
    # entropies 0 1 2 | 3: the upper half is 2 and 3 (median 1.5)
    table = reward_table([1, 1], length=[3, 1], notes={"entropy": [[0, 1, 2], [3]]})
    assert_rows(high_entropy(table, top=0.5).values[:, 0], [[0, 0, 1], [1]])


def test_rows_without_a_noted_entropy_keep_their_advantage_and_move_no_bar():
    table = reward_table([1, 5], length=[4, 2], notes={"entropy": [[0, 1, 2, 3], [None, None]]})
    assert_rows(high_entropy(table, top=0.5).values[:, 0], [[0, 0, 1, 1], [5, 5]])


def test_without_any_entropy_nothing_is_silenced():
    table = reward_table([1], length=[2], notes={"entropy": [[None, None]]})
    assert_rows(high_entropy(table).values[:, 0], [[1, 1]])


def test_high_entropy_asks_the_engine_for_its_note():
    from mmrl.config.registry import find

    assert find("advantage", "high_entropy").needs.notes == {"entropy"}


def test_drop_truncated_does_not_learn_from_cut_answers():
    table = reward_table([[1, 2], [3], [4]], tags={"finish": [["", "length"], ["stop"], ["length"]]})
    kept = drop_truncated(table)
    assert kept.learn.tolist() == [[False, False], [True, False], [False, False]]
    assert kept.valid.equal(table.valid), "cut answers stay in the statistics"


def test_conversations_that_hit_another_limit_are_dropped_where_that_is_asked():
    table = reward_table([1, 2, 3, 4], tags={"finish": ["stop", "length", "turns", "tool_error"]})
    assert drop_truncated(table, finish=("turns", "tool_error")).learn[:, 0].tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_drop_truncated_keeps_all_where_no_engine_said_how_answers_finished():
    assert drop_truncated(reward_table([1, 2])).learn.equal(torch.tensor([[True], [True]]))


def test_drop_zero_does_not_learn_from_rows_without_any_advantage():
    table = drop_zero(reward_table([[0.0, 0.5], [0.0, 0.0], [-1.0], [None, 0.0]]))
    assert table.learn.tolist() == [[True, True], [False, False], [True, False], [False, False]]
    assert table.values[0, 0].tolist() == [0.0, 0.5], "a row counts with its steps of advantage 0"
    unknown = reward_table([None, 1.0])  # whose number means nothing
    assert drop_zero(unknown.put(torch.ones(2, 1, 1))).learn.tolist() == [[False], [True]]


def test_drop_zero_keeps_what_was_dropped_dropped():
    table = reward_table([1.0, 2.0])
    table = drop_zero(table.replace(learn=torch.tensor([[False], [True]])))
    assert table.learn.tolist() == [[False], [True]]


def test_notes_may_be_longer_or_shorter_than_the_longest_row():
    for noted in ([[0, 9]], [[0, 9, 5, 7, 8]]):
        table = reward_table([1], length=[4], notes={"entropy": noted})
        assert high_entropy(table, top=0.5).values.shape == (1, 1, 4)
    table = reward_table([1], length=[4], notes={"entropy": [[0, 9]]})
    assert_rows(high_entropy(table, top=0.5).values[:, 0], [[0, 1, 1, 1]])


def test_statistics_over_steps_leave_out_those_that_the_policy_did_not_choose():
    written = [[None] * 4 + [-1.0, -2.0], [-1.0, -1.0]]
    table = reward_table([1, 0], length=[6, 2], notes={"logp": written})
    # .5 .5 -.5 -.5: mean 0, deviation sqrt(4 * .25 / 3) = .577350
    found = batch_normalize(per_step(group_center(table)), eps=0)
    assert_rows(found.values[:1, 0, 4:], [[0.866025, 0.866025]])
    assert_rows(found.values[1:, 0], [[-0.866025, -0.866025]])
    assert not found.valid[0, 0, :4].any() and found.valid[0, 0, 4:].all()
    # 1 1 0 0: mean and deviation (over their number) .5
    found = group_normalize(per_step(table), by=("group",), std="population", eps=0)
    assert_rows(found.values[:1, 0, 4:], [[1, 1]])


def test_rows_without_any_log_probability_have_no_such_steps():
    table = reward_table([1, 0], length=[2, 2], notes={"logp": [[None, None], [-1.0, -1.0]]})
    assert per_step(table).valid.all(), "the first is a demonstration"
