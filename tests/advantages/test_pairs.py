"""Preference pairs out of rewards."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.pairs import best_vs_worst, kto_kl_rows
from mmrl.advantages.shape import total
from tests.support.tables import assert_rows, reward_table


def pair_of(rewards, *, group=(), **options):
    """Give the advantages of one place, None where a row is not learned from."""
    table = best_vs_worst(reward_table(rewards, group=group), **options)
    return [
        int(value) if learned else None
        for value, learned in zip(table.values[:, 0, 0].tolist(), table.learn[:, 0].tolist(), strict=True)
    ]


def test_best_and_worst_of_a_group_are_a_pair_and_the_rest_is_not_learned_from():
    assert pair_of([0.3, 0.9, 0.1, 0.5]) == [None, 1, -1, None]
    assert pair_of([0.1, 0.7, 0.9, 0.8], group="aabb") == [-1, 1, 1, -1]


def test_ties_are_dropped():
    assert pair_of([0.5, 0.5, 0.5]) == [None] * 3
    assert pair_of([0.5, 0.5 + 1e-9, 0.2, 0.4], group="aabb") == [None, None, -1, 1]


def test_of_several_best_and_worst_the_first_are_taken():
    assert pair_of([0.1, 0.9, 0.9, 0.1, 0.1]) == [-1, 1, None, None, None]


@pytest.mark.parametrize("margin, wanted", [(0.1, [1, -1]), (0.5, [None] * 2), (0.6, [None] * 2)])
def test_a_pair_must_be_further_apart_than_the_margin(margin, wanted):
    assert pair_of([1.0, 0.5], margin=margin) == wanted


def test_a_group_of_one_and_one_without_rewards_make_no_pair():
    assert pair_of([0.5]) == [None]
    assert pair_of([None, 0.5]) == [None, None]
    assert pair_of([None, 0.5, 0.2]) == [None, 1, -1]


def test_every_place_makes_a_pair_of_its_own():
    # segments: the second ties, and only one row has a third
    table = best_vs_worst(reward_table([[1.0, 0.5, 7.0], [0.0, 0.5]], ends=[[1, 2, 3], [1, 2]]))
    assert_rows(table.values[:, 0], [[1, 0, 0], [-1, 0, 0]])
    assert table.learn.tolist() == [[True, False, False], [True, False, False]]


def test_places_are_compared_across_rows_on_request():
    table = best_vs_worst(reward_table([[1.0, 0.5], [0.2, 0.6]]), by=("group",))
    assert_rows(table.values[:, 0], [[1, 0], [-1, 0]])


def test_what_is_not_learned_from_stays_so_but_takes_part():
    table = reward_table([0.9, 0.5, 0.1])
    table = best_vs_worst(table.replace(learn=torch.tensor([[False], [True], [True]])))
    assert table.learn.tolist() == [[False], [False], [True]]
    assert table.values.flatten().tolist() == [1, 0, -1]


def test_several_rewards_make_pairs_each():
    table = best_vs_worst(reward_table({"a": [3, 2, 1], "b": [1, 1, 2]}))
    assert_rows(table.values, [[[1], [-1]], [[0], [0]], [[-1], [1]]])
    assert table.learn.tolist() == [[True], [False], [True]]


def test_exchanging_rewards_with_their_negatives_exchanges_the_signs():
    rewards = [0.3, 0.9, 0.1, 0.5]
    table, mirrored = (best_vs_worst(reward_table(listed)) for listed in (rewards, [-r for r in rewards]))
    assert table.values.equal(-mirrored.values) and table.learn.equal(mirrored.learn)


def test_a_pair_of_too_different_lengths_is_not_learned_from():
    # 6 steps are twice 3, 7 are more; rows that are no side of a pair do not count
    for length, wanted in (([6, 3, 99], [1, -1, None]), ([7, 3, 5], [None] * 3), ([3, 7, 5], [None] * 3)):
        table = best_vs_worst(reward_table([0.9, 0.1, 0.5], length=length), length_ratio=2.0)
        said = table.values[:, 0, 0].tolist()
        learned = table.learn[:, 0].tolist()
        assert [int(v) if kept else None for v, kept in zip(said, learned, strict=True)] == wanted


# ---- rows beside a pair

BY = ("group", "place", "twin")


def test_unrelated_rows_stay_beside_the_pair_and_are_noted():
    table = reward_table([0.2, 0.9, None], tags={"unrelated": ["", "", "yes"]}, length=[2, 3, 1])
    table = kto_kl_rows(best_vs_worst(table, by=("group", "place", "unrelated")))
    assert table.values[:, 0, 0].tolist() == [-1, 1, 0]
    assert table.learn.all() and table.valid.all()
    assert table.notes["unrelated"].tolist() == [[0] * 3, [0] * 3, [1] * 3]
    plain = kto_kl_rows(best_vs_worst(reward_table([0.2, 0.9])))
    assert not plain.notes["unrelated"].any() and plain.values[:, 0, 0].tolist() == [-1, 1]


def test_single_answers_are_labelled_by_their_rewards():
    """KTO without pairs: an answer whose label is 1 or -1, and one to another prompt, in each group."""
    tags = {"unrelated": ["", "yes", "", "yes"]}
    table = kto_kl_rows(total(reward_table([1.0, None, -1.0, None], tags=tags, group=[0, 0, 1, 1])))
    assert table.values[:, 0, 0].tolist() == [1, 0, -1, 0] and table.learn.all()


# ---- several rewards and several places at once

GRID = {"a": [[1, 5], [2, 4], [3, 3]], "b": [[6, 1], [9, 2], [7, 3]]}


def test_rewards_and_places_are_not_mixed_up():
    pair = best_vs_worst(reward_table(GRID))
    assert_rows(pair.values[:, 0], [[-1, 1], [0, 0], [1, -1]])
    assert_rows(pair.values[:, 1], [[-1, -1], [1, 0], [0, 1]])
    # the second row is in a pair of b alone, at its first place
    assert pair.learn.tolist() == [[True, True], [True, False], [True, True]]
    # the first row has no a at its second place, where the others make the pair
    pair = best_vs_worst(reward_table({**GRID, "a": [[1, None], [2, 4], [3, 3]]}))
    assert_rows(pair.values[:, 0], [[-1, 0], [0, 1], [1, -1]])
    assert_rows(pair.values[:, 1], [[-1, -1], [1, 0], [0, 1]])


def test_a_row_with_one_unrelated_outcome_is_noted():
    found = kto_kl_rows(reward_table([[1, 2], [3, 4]], tags={"unrelated": [["", "yes"], ["", ""]]}))
    assert found.notes["unrelated"].tolist() == [[1, 1], [0, 0]]
    assert_rows(found.values[:, 0], [[1, 0], [3, 4]])
