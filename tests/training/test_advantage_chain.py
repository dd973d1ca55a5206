"""Faults of the advantage chain: the error names the piece that is to blame."""

from __future__ import annotations

import math
import re

import pytest

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.training.method import ChainError, through_chain
from tests.support.tables import reward_table

HERE = "tests.training.test_advantage_chain"


def nothing(table):
    """Forget to return the table."""


def failing(table):
    """Look up what is not there."""
    raise KeyError("iou")


def root(table):
    """Take the root of values, of which some are negative."""
    return table.put((table.values - 0.5).sqrt())


def shorter(table):
    """Leave rows out."""
    return table.select(table.values[:, 0, 0] > 0)


def reciprocal(table):
    """Divide by rewards, of which some are 0, and blank what does not apply."""
    return table.replace(values=(1 / table.values).masked_fill(~table.valid, math.nan))


def chained(table, *names: str):
    pieces = Pieces(Stream())
    chain = [pieces.make("advantage", Piece(name), place=f"advantage[{i}]") for i, name in enumerate(names)]
    return through_chain(chain, table, 3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["total", f"{HERE}:nothing"],
            f"advantage[1]: '{HERE}.nothing' must return a reward table of the same 3 rows, not NoneType",
        ),
        ([f"{HERE}:shorter", "total"], f"'{HERE}.shorter' must return a reward table of the same 3 rows"),
        ([f"{HERE}:failing"], f"advantage[0]: '{HERE}.failing' raised KeyError at step 3: 'iou'"),
        (
            # the root of 0 - 1/2 is the first fault; the means that follow spread it over the group
            ["total", f"{HERE}:root", "group_normalize"],
            f"advantage[1]: '{HERE}.root' made 1 valid values non-finite at step 3, the first of them nan",
        ),
        ([f"{HERE}:reciprocal", "total"], "the first of them inf for 'reward' of prompt"),
        (["total", f"{HERE}:reciprocal"], "which was [0.0]"),
    ],
)
def test_the_piece_at_fault_is_named(names, message):
    with pytest.raises(ChainError, match=re.escape(message)):
        chained(reward_table([1.0, 0.0, 2.0]), *names)


def test_a_value_that_does_not_apply_may_be_anything():
    table = reward_table([1.0, 2.0, 4.0])
    table = table.replace(valid=table.valid & (table.values != 4.0))
    assert chained(table, f"{HERE}:reciprocal").values.flatten().tolist()[:2] == [1.0, 0.5]
