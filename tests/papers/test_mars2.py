"""MARS2: a shaped tree of answers, by worked numbers."""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.papers.mars2 import sibling_shape
from tests.support.tables import assert_rows, reward_table


def test_a_tree_is_shaped_by_parents_and_siblings():
    tree = {"node": list("01234"), "parent": ["", "", "0", "0", "1"]}
    table = reward_table([0.4, 0.8, 1, 0, 0.6], tags=tree)
    shaped = sibling_shape(table)
    assert_rows(shaped.values[:, 0], [[0.2], [1], [1.4], [-0.35], [0.5]])
    found = group_normalize(shaped, by=("group",), eps=1e-9).values[:, 0]
    assert_rows(found, [[-0.513265], [0.659912], [1.246500], [-1.319824], [-0.073324]])
    assert torch.equal(sibling_shape(table, gamma=0.0).values, table.values)
