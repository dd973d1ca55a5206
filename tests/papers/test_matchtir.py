"""MatchTIR: calls matched with reference calls, by worked numbers and by trying all orders."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from mmrl.core.tool_calls import Call, CallError
from mmrl.papers.matchtir import call_match, greedy_pairs, likeness, matched, optimal_pairs, transport_plan
from tests.rewards.test_tool_calls import PREDICTED, call, conversation, measured, one, written


def total(scores, pairs):
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    return sum(scores[i][j] for i, j in pairs)


def test_greedy_is_not_optimal():
    scores = [[0.9, 0.8], [0.8, 0.0]]
    assert total(scores, greedy_pairs(scores)) == pytest.approx(0.9)
    assert total(scores, optimal_pairs(scores)) == pytest.approx(1.6)  # 0.8 + 0.8
    assert greedy_pairs([[0.5, 0.75], [1, 0.375], [0, 0]]) == [(1, 0), (0, 1)]
    assert optimal_pairs([[0.2], [0.7], [0.1]]) == [(1, 0)] and optimal_pairs([[0.2, 0.7, 0.1]]) == [(0, 1)]
    assert optimal_pairs([]) == optimal_pairs([[], []]) == greedy_pairs([[], []]) == []


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 5), (5, 3), (4, 4)], ids=str)
def test_optimal_pairs_are_the_best_of_all_orders(shape):
    rows, columns = shape
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        # Tenths, so that many sums are equal.
        scores = torch.randint(0, 11, shape, generator=generator).double().div(10).tolist()
        if rows <= columns:
            orders = [list(enumerate(order)) for order in permutations(range(columns), rows)]
        else:
            orders = [[(i, j) for j, i in enumerate(order)] for order in permutations(range(rows), columns)]
        best = max(total(scores, order) for order in orders)
        pairs = optimal_pairs(scores)
        assert len(pairs) == min(shape) and total(scores, pairs) == pytest.approx(best)


def test_many_calls_are_matched_in_no_time():
    # A permutation of 150 pairs of score 1 is hidden among scores below 1/2.
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(160, 150, generator=generator).div(2)
    hidden = torch.randperm(160, generator=generator)[:150]
    scores[hidden, torch.arange(150)] = 1.0
    pairs = optimal_pairs(scores.tolist())
    assert sorted(pairs) == sorted(zip(hidden.tolist(), range(150), strict=True))


REFERENCE = [call("search", q="b"), call("search", q="a", k=3)]


def test_likeness_of_calls_is_the_worked_one():
    made = [Call(**each) for each in PREDICTED]
    alike = [[likeness(each, reference) for reference in REFERENCE] for each in made]
    assert alike == [[pytest.approx(0.5), pytest.approx(0.75)], [1, pytest.approx(0.375)], [0, 0]]
    assert likeness(CallError("no JSON"), REFERENCE[0]) == 0
    found = one(call_match, written(*PREDICTED), {"calls": REFERENCE})
    assert found == pytest.approx(0.583333, abs=1e-6)


def test_soft_matching_shares_references_out():
    # One call, two references: half of each, so (0.5 + 0.75) / 2. Two calls, one reference: half of it each.
    assert matched([[0.5, 0.75]], "soft") == pytest.approx([0.625])
    assert sum(matched([[1.0], [0.0]], "soft")) == pytest.approx(0.5)
    # By symmetry the plan of [[1, 0], [0, 1]] is exp(S / 0.1) over its sum, 2 (e^10 + 1).
    plan = transport_plan([[1.0, 0.0], [0.0, 1.0]])
    right = math.exp(10) / (2 * (math.exp(10) + 1))
    assert plan == [pytest.approx([right, 0.5 - right]), pytest.approx([0.5 - right, right])]
    # Two right calls have a half each: (0.5 + 0.5) / 2 in the mean over calls.
    both = written(call("search", q="a", k=3), call("search", q="b"))
    assert one(call_match, both, {"calls": REFERENCE}, matching="soft") == pytest.approx(0.5, abs=0.02)
    assert one(call_match, written(*PREDICTED), {"calls": []}, matching="soft") == 0
    assert one(call_match, "no call", {"calls": REFERENCE}, matching="soft") == 0


def test_a_plan_has_equal_rows_and_columns_and_nears_the_optimal_pairs():
    scores = [[0.5, 0.75, 0.1], [1.0, 0.375, 0.2]]
    plan = transport_plan(scores)
    assert [sum(row) for row in plan] == pytest.approx([1 / 2] * 2)
    assert [sum(column) for column in zip(*plan, strict=True)] == pytest.approx([1 / 3] * 3)
    square = [[0.9, 0.8], [0.8, 0.0]]
    near = transport_plan(square, 0.01)
    assert near == [pytest.approx([0, 0.5], abs=1e-3), pytest.approx([0.5, 0], abs=1e-3)]  # those of sum 1.6


def test_calls_without_a_reference_are_not_judged():
    assert one(call_match, written(*PREDICTED)) is None
    assert one(call_match, "no call", {"calls": REFERENCE}) == 0
    with pytest.raises(ValueError, match="wants calls like .* prompt 'a' has 'search'"):
        one(call_match, "no call", {"calls": ["search"]})


def test_calls_are_matched_over_a_conversation_or_turn_by_turn():
    turns = (written(call("search", q="b")), written(call("search", q="a", k=3), call("calc", x=1)), "done")
    row = conversation(*turns, columns={"calls": REFERENCE})
    assert measured(row, "call_match")[0] == [
        [pytest.approx(2 / 3)]
    ]  # two of three calls are the wanted ones
    row = conversation(*turns, every=True, columns={"calls": REFERENCE})
    assert measured(row, "call_match", at="every")[0] == [[1, 0.5, 0]]
    # A call that comes again in a later turn finds its reference taken.
    turns = (written(call("search", q="b")), written(call("search", q="b")), "done")
    row = conversation(*turns, every=True, columns={"calls": REFERENCE[:1]})
    assert measured(row, "call_match", at="every")[0] == [[1, 0, 0]]


def test_a_call_that_cannot_be_read_matches_nothing():
    text = written(call("search", q="b")) + "<tool_call>{oops</tool_call>"
    assert one(call_match, text, {"calls": REFERENCE}) == 0.5
    assert one(call_match, "<tool_call>{oops</tool_call>", {"calls": REFERENCE}) == 0
