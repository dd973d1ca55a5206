"""Which rows of a group are learned from: TTRL, D3S, DaGRPO."""

from __future__ import annotations

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.subset import keep_first
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from tests.support.tables import assert_rows, reward_table


def kept(table):
    return table.learn[:, 0].tolist()


def test_keep_first_compares_the_first_rows_of_a_group_alone():
    table = keep_first(reward_table([9, 1, 0, 0, 5, 7], group="baaabb"), keep=2)
    assert kept(table) == [True, True, True, False, True, False]
    assert_rows(group_normalize(table, eps=0.0).values[1:3, 0, 0], [0.707107, -0.707107])
    assert kept(keep_first(reward_table([1, 0]), keep=5)) == [True, True]


def test_the_budget_of_rows_and_steps_follows_a_schedule():
    def linear(start, end):
        return {"name": "linear", "start": start, "end": end, "steps": 4}

    pieces = Pieces(Stream())
    rows = pieces.make("advantage", Piece("most_varied", {"keep": linear(4, 8)}))
    steps = pieces.make("advantage", Piece("keep_steps", {"top": linear(0.5, 1.0)}))
    pieces.tick(Clock(1))
    # a quarter of the way from (4, .5) to (8, 1)
    assert (rows.options["keep"], steps.options["top"]) == (5, 0.625)
