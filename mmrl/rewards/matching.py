"""Matching of rows with columns by a table of scores: one to one, greedy or optimal, or in shares."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

Pairs = list[tuple[int, int]]


def greedy_pairs(scores: Sequence[Sequence[float]]) -> Pairs:
    """Pair rows with columns one to one: the best pair left, again and again; a score of 0 is none."""
    ordered = sorted(
        ((i, j) for i, row in enumerate(scores) for j, score in enumerate(row) if score > 0),
        key=lambda pair: -scores[pair[0]][pair[1]],
    )
    pairs, rows, columns = [], set(), set()
    for i, j in ordered:
        if i not in rows and j not in columns:
            pairs.append((i, j))
            rows.add(i)
            columns.add(j)
    return pairs


def optimal_pairs(scores: Sequence[Sequence[float]]) -> Pairs:
    """Pair rows with columns one to one so that the sum of scores is largest (Kuhn-Munkres, cubic time)."""
    count, width = len(scores), len(scores[0]) if scores else 0
    if count > width:
        return [(i, j) for j, i in optimal_pairs(list(zip(*scores, strict=True)))]
    # The cost of a pair is minus its score. Potentials keep cost >= of_row + of_column, equal for pairs.
    # Rows and columns count from 1: column 0 holds the row that is being added, row 0 is none.
    of_row, of_column, row_at = [0.0] * (count + 1), [0.0] * (width + 1), [0] * (width + 1)
    for row in range(1, count + 1):
        row_at[0], column = row, 0
        slack, came_from, seen = [math.inf] * (width + 1), [0] * (width + 1), [False] * (width + 1)
        while row_at[column]:  # the cheapest path that changes pairs, as Dijkstra finds it, to a free column
            seen[column], here, step, nearest = True, row_at[column], math.inf, 0
            for j in range(1, width + 1):
                if seen[j]:
                    continue
                reduced = -scores[here - 1][j - 1] - of_row[here] - of_column[j]
                if reduced < slack[j]:
                    slack[j], came_from[j] = reduced, column
                if slack[j] < step:
                    step, nearest = slack[j], j
            for j in range(width + 1):
                if seen[j]:
                    of_row[row_at[j]] += step
                    of_column[j] -= step
                else:
                    slack[j] -= step
            column = nearest
        while column:
            row_at[column], column = row_at[came_from[column]], came_from[column]
    return [(row_at[j] - 1, j - 1) for j in range(1, width + 1) if row_at[j]]


def transport_plan(
    scores: Sequence[Sequence[float]], reg: float = 0.1, tol: float = 1e-9, max_iters: int = 1000
) -> list[list[float]]:
    """Compute shares of all pairs, 1 together, by entropic optimal transport of the cost -score (Sinkhorn).

    Every row has the same share of the whole, and so has every column. `reg` is the weight of the entropy:
    the smaller, the closer to one-to-one. The iteration ends once no factor changes by more than `tol`,
    or after `max_iters`.
    """
    count, width = len(scores), len(scores[0]) if scores else 0
    if not count or not width:
        return [[] for _ in scores]
    # Divided by the largest number of a row, which the factor of the row takes up, so that nothing overflows.
    kernel = [[math.exp((score - max(row)) / reg) for score in row] for row in scores]
    by_row, by_column = [1.0] * count, [1.0] * width
    for _ in range(max_iters):
        by_row = [1 / count / sum(map(operator.mul, row, by_column)) for row in kernel]
        columns = [sum(map(operator.mul, column, by_row)) for column in zip(*kernel, strict=True)]
        found = [1 / width / total for total in columns]
        changed = max(abs(new / old - 1) for new, old in zip(found, by_column, strict=True))
        by_column = found
        if changed < tol:
            break
    return [
        [u * value * v for value, v in zip(row, by_column, strict=True)]
        for u, row in zip(by_row, kernel, strict=True)
    ]
