"""Advantage alignment: cross terms of two players, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mmrl.papers.advantage_alignment import alignment
from tests.support.tables import assert_rows, reward_table


def played(rewards, **tags):
    """Lay out conversations with a reward for every turn."""
    turns = [[str(turn) for turn in range(len(row))] for row in rewards]
    return reward_table(rewards, tags={"turn": turns, **tags})


def test_alignment_adds_the_others_advantage():
    roles = [["A", "B"] * 3]
    table = played([[1, 0.3, -0.5, 0.4, 0.2, -0.6]], role=roles)
    found = alignment(table).values[0, 0]
    assert_rows(found[None, 0::2], [[1, 0.237280, -0.308723]])
    assert_rows(alignment(table, discounted=True).values[:, 0, 0::2], [[1, 0.227789, -0.284519]])
    assert torch.equal(alignment(table, beta=0.0).values, table.values)
    # The other player's: w = .96 * .96 * .3, and its own advantage .4 against the other's -.5
    assert found[3].item() == pytest.approx(0.4 + 2 * 0.27648 * -0.5)


def test_alignment_of_three_players_is_an_error():
    with pytest.raises(ValueError, match="two players"):
        alignment(played([[1, 2, 3]], role=[["A", "B", "C"]]))
