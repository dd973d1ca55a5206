"""One-to-one matching: greedy and optimal pairs, by worked numbers and by trying all orders."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from mmrl.rewards.matching import greedy_pairs, optimal_pairs


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
