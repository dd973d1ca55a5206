"""Credit in a tree of answers: SPO's worked example, tokens that rows share, and parts that end early."""

from __future__ import annotations

import pytest
import torch

from mmrl.advantages.shape import total
from mmrl.advantages.trees import branch_pairs, tree_values
from mmrl.core.step_table import spread
from mmrl.objectives.compare import sigmoid
from tests.support.tables import assert_rows, reward_table, step_table

LEAVES = [1, 0, 1, 0, 0, 0, 1, 1, 1]
FIRST = {"none": [0.111111, -0.555556, 0.444444], "siblings": [0.267261, -1.336306, 1.069045]}


def tree(**columns):
    """Lay three parts of two tokens out, each with three continuations of one token."""
    nodes = [[i // 3, i // 3, 3 + i] for i in range(9)]
    return reward_table(LEAVES, group="a" * 9, length=[3] * 9, notes={"node": nodes}, **columns)


@pytest.mark.parametrize("scale", FIRST)
def test_spo_credits_each_part_with_what_it_adds(scale):
    table = tree_values(total(tree()), scale=scale)
    assert_rows(table.values[:, 0, 0], [FIRST[scale][i // 3] for i in range(9)])
    assert torch.equal(table.values[:, 0, 0], table.values[:, 0, 1])
    third = 1 / 3 if scale == "none" else 1 / 3 / (2 / 9) ** 0.5  # values 1, 0, 1 have a variance of 2/9
    assert_rows(table.values[:, 0, 2], [third, -2 * third, third, *[0] * 6], tolerance=1e-6)


def test_shared_tokens_are_learned_from_once_and_parts_that_add_nothing_never():
    batch = spread(tree_values(total(tree())), step_table([[0.0] * 3] * 9)[1])
    wanted = torch.zeros(9, 3)
    wanted[[0, 3, 6], :2] = 1
    wanted[:3, 2] = 1
    assert batch.mask.equal(wanted.to(batch.mask))
    assert batch.advantage.ne(0).equal(wanted.bool())


def test_the_value_of_a_part_is_the_mean_of_its_continuations_and_not_of_leaves():
    # part 0 ended its answer; part 1 has two continuations: root (1 + (0 + 1) / 2) / 2 = .75
    table = reward_table([1, 0, 1], length=[1, 2, 2], notes={"node": [[0], [1, 2], [1, 3]]})
    assert_rows(tree_values(table).values[:, 0], [[0.25], [-0.25, -0.5], [-0.25, 0.5]])


def test_trees_of_several_groups_and_rows_without_a_tree():
    table = reward_table(
        [1, 0, 1, None, 0.5], group="aabbb", length=[1] * 5, notes={"node": [[0], [1], [0], [1], [None]]}
    )
    table = tree_values(table)
    assert_rows(table.values[:, 0], [[0.5], [-0.5], [0.25], [0], [-0.25]])
    assert table.valid[:, 0, 0].tolist() == [True, True, True, False, True]


# ---- pairs


def tokens(nodes):
    return [[10 * node for node in row] for row in nodes]


def test_branches_to_right_answers_are_preferred_to_siblings_without_any():
    nodes = [[i // 3, i // 3, 3 + i] for i in range(9)]
    table = reward_table(LEAVES, group="a" * 9, length=[3] * 9, notes={"node": nodes, "token": tokens(nodes)})
    pairs = branch_pairs(total(table))
    wanted = torch.zeros(9, 3, dtype=torch.float64)
    # Leaves 0 and 1 part at the last token; parts 0 and 1 at the first, by rows that are left.
    wanted[0, 2], wanted[1, 2] = 1, -1
    wanted[2, :2], wanted[3, :2] = 1, -1
    assert torch.equal(pairs.values[:, 0], wanted)
    assert torch.equal(pairs.learn, wanted != 0)
    group = pairs.ids["group"][:, 0].tolist()
    assert group[0] == group[1] != group[2] == group[3] and len({*group[:4], group[4]}) == 3


def test_the_worked_loss_of_a_pair_of_branches():
    table = reward_table(
        [1, 0], group="aa", length=[2, 2], notes={"node": [[0, 1], [0, 2]], "token": [[5, 6], [5, 7]]}
    )
    pairs = branch_pairs(table)
    rows, batch = step_table([[0.0] * 2] * 2)
    batch = spread(pairs, batch)
    ratio = torch.tensor([[9.0, 0.5], [-9.0, -0.3]], dtype=torch.float64)
    batch = batch.replace(totals=batch.count())
    assert sigmoid(ratio * batch.mask, batch, beta=0.1).item() == pytest.approx(0.653947, abs=1e-6)


def test_equal_siblings_are_one_branch_and_a_parting_without_contrast_makes_no_pair():
    nodes = [[0, 1], [0, 2], [0, 3], [4, 5]]
    same = [[5, 6], [5, 6], [5, 7], [5, 6]]
    table = reward_table([1, 0, 1, None], group="aaaa", length=[2] * 4, notes={"node": nodes, "token": same})
    assert not branch_pairs(table).learn.any()  # tokens 6 lead to a right answer, and so do tokens 7
    table = reward_table([1, 0, 0, None], group="aaaa", length=[2] * 4, notes={"node": nodes, "token": same})
    found = branch_pairs(table)
    assert found.values[:, 0].tolist() == [[0, 1], [0, 0], [0, -1], [0, 0]]
    alone = reward_table(
        [1, 0], group="ab", length=[1, 1], notes={"node": [[0], [None]], "token": [[1], [1]]}
    )
    assert not branch_pairs(alone).learn.any()
