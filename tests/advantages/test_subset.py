"""Which rows of a group are learned from: D3S, DaGRPO."""

from __future__ import annotations

import itertools

import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.advantages.subset import distinct, most_varied
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock
from tests.support.tables import reward_table


def kept(table):
    return table.learn[:, 0].tolist()


def test_most_varied_keeps_the_two_highest_and_the_two_lowest():
    table = group_normalize(reward_table([1, 1, 0, 0.5, 0, 0, 1, 0]), std="population", eps=1e-6)
    chosen = table.values[:, 0, 0][torch.tensor(kept(most_varied(table, keep=4)))]
    assert len(chosen) == 4 and abs(chosen.var(unbiased=False).item() - 1.163631) < 2e-6


def test_most_varied_is_the_best_of_all_subsets():
    generator = torch.Generator().manual_seed(0)
    for keep in (1, 2, 3, 5):
        values = torch.randn(7, generator=generator, dtype=torch.float64)
        table = most_varied(reward_table(values.tolist()), keep=keep)
        found = values[torch.tensor(kept(table))]
        best = max(torch.stack(subset).var(unbiased=False) for subset in itertools.combinations(values, keep))
        assert len(found) == keep
        torch.testing.assert_close(found.var(unbiased=False), best)


def test_most_varied_drops_equal_groups_and_keeps_small_ones():
    table = reward_table([1, 2, 3, 0, 0, 0], group="aaabbb")
    assert kept(most_varied(table, keep=4)) == [True] * 3 + [False] * 3
    # over the collection: the largest, and the smallest of the rest
    assert sum(kept(most_varied(table, keep=2, by=()))) == 2


def test_distinct_drops_what_is_close_to_the_other_side():
    table = reward_table({"right": [1, 1, 0, 0], "fine": [0.9, 0.85, 0.8, 0.2]}, weights={"fine": 0.0})
    assert kept(distinct(table, of="fine", right="right")) == [True, True, False, True]
    assert kept(distinct(table, of="fine", right="right", strict=True)) == [False, False, False, True]


def test_distinct_keeps_groups_without_another_side_and_answers_without_a_score():
    table = reward_table({"right": [1, 1, 0, 1], "fine": [0.9, 0.9, 0.2, None]}, group="aabb")
    assert kept(distinct(table, of="fine", right="right")) == [True] * 4


def test_the_budget_of_rows_and_steps_follows_a_schedule():
    def linear(start, end):
        return {"name": "linear", "start": start, "end": end, "steps": 4}

    pieces = Pieces(Stream())
    rows = pieces.make("advantage", Piece("most_varied", {"keep": linear(4, 8)}))
    steps = pieces.make("advantage", Piece("keep_steps", {"top": linear(0.5, 1.0)}))
    pieces.tick(Clock(1))
    # a quarter of the way from (4, .5) to (8, 1)
    assert (rows.options["keep"], steps.options["top"]) == (5, 0.625)
