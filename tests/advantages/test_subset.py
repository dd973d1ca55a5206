"""Which rows of a group are learned from: D3S, DaGRPO."""

from __future__ import annotations

from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock


def kept(table):
    return table.learn[:, 0].tolist()


def test_the_budget_of_rows_and_steps_follows_a_schedule():
    def linear(start, end):
        return {"name": "linear", "start": start, "end": end, "steps": 4}

    pieces = Pieces(Stream())
    rows = pieces.make("advantage", Piece("most_varied", {"keep": linear(4, 8)}))
    steps = pieces.make("advantage", Piece("keep_steps", {"top": linear(0.5, 1.0)}))
    pieces.tick(Clock(1))
    # a quarter of the way from (4, .5) to (8, 1)
    assert (rows.options["keep"], steps.options["top"]) == (5, 0.625)
