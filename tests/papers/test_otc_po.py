"""OTC-PO: rewards over the number of tool calls, by worked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.config.binding import Pieces
from mmrl.config.schema import as_piece
from mmrl.core.rng import Stream
from mmrl.papers.otc_po import ToolProductivity, productivity
from mmrl.training.method import through_chain
from mmrl.training.score import score
from tests.rewards.test_tool_calls import call, conversation, nested, written
from tests.support.tables import assert_rows, reward_table


@pytest.mark.parametrize(
    "least, smoothing, wanted",
    [(2, 1.0, [0, 0.866025, 1, 0.951057, 0.866025]), (0, 1.0, [1, 0.5, 0.309017, 0.222521])],
)
def test_tool_productivity_is_one_at_the_fewest_calls(least, smoothing, wanted):
    found = [productivity(calls, least, smoothing) for calls in range(len(wanted))]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_the_fewest_calls_of_a_prompt_are_remembered():
    piece = ToolProductivity(of="right", calls="tool_calls")
    first = reward_table({"right": [1, 1, 0], "tool_calls": [4, 2, 0]}, weights={"tool_calls": 0.0})
    assert torch.equal(piece(first).values, first.values), "no answer was right yet"
    piece.observe((), first)
    assert_rows(piece(first).values[:, 0], [[0.866025], [1], [0]])
    later = reward_table({"right": [1], "tool_calls": [3]}, weights={"tool_calls": 0.0})
    piece.observe((), later)
    assert_rows(piece(later).values[:, 0], [[0.951057]])


def test_otc_po_reads_calls_of_all_turns_with_one_outcome_and_with_one_of_each():
    # Right answers with two calls and with one, and a wrong one without any; one call is enough, so that the
    # rewards are sin(2 pi / 3) = 0.866025, sin(pi / 2) = 1 and 0.
    look = written(call("crop"))
    for every in (False, True):
        texts = [(look, look, "1"), (look, "1"), ("0",)]
        rows = tuple(conversation(*turns, every=every) for turns in texts)
        rewards = [nested("precomputed", key="right"), nested("tool_calls", weight=0.0)]
        rows = tuple(
            replace(row, outcomes=(*row.outcomes[:-1], replace(row.outcomes[-1], recorded={"right": right})))
            for row, right in zip(rows, (1.0, 1.0, 0.0), strict=True)
        )
        rewards[0].label = "right"
        table = score(rewards, rows)
        pieces = (
            {"name": "tool_productivity", "of": "right", "calls": "tool_calls"},
            "total",
            "group_normalize",
        )
        chain = [Pieces(Stream()).make("advantage", as_piece(piece, "")) for piece in pieces]
        chain[0].function.observe(rows, table)
        made = through_chain(chain, table, 0)
        found = made.values.sum((1, 2)) if not every else made.values[:, 0, 0]
        # The mean is 0.622008, the deviation 0.542831, to which 1e-4 is added.
        assert found.tolist() == pytest.approx([0.449423, 0.696187, -1.145610], abs=2e-4)
