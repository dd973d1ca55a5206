"""Pareto fronts of several objectives, all to be maximised: members, gaps, and how good a front is.

As in C-MORL (arXiv 2410.02236), which fills the gaps of a front by training on from its loneliest members.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

Point = tuple[float, ...]  # a value of every objective


def front_of(points: Sequence[Point], reference: Point | None = None) -> list[int]:
    """Return the places of points that no other beats, in order; equal points count once.

    A point with a value that is not finite, or below the `reference` in an objective, is never a member.
    """

    def admitted(point: Point) -> bool:
        above = reference is None or all(a >= b for a, b in zip(point, reference, strict=True))
        return above and all(map(math.isfinite, point))

    inside = [i for i, point in enumerate(points) if admitted(point) and point not in points[:i]]

    def beaten(point: Point) -> bool:
        return any(
            points[j] != point and all(a >= b for a, b in zip(points[j], point, strict=True)) for j in inside
        )

    return [i for i in inside if not beaten(points[i])]


def crowding_distance(front: Sequence[Point]) -> list[float]:
    """Measure how far apart the neighbours of each member are; infinite for the ends of an objective.

    For every objective (next - previous) / (largest - smallest), added up. An objective without a spread adds
    0; of equal values the first counts as the smaller one.
    """
    distances = [0.0] * len(front)
    for values in zip(*front, strict=True):
        order = sorted(range(len(front)), key=values.__getitem__)
        spread = values[order[-1]] - values[order[0]]
        if not spread:
            continue
        distances[order[0]] = distances[order[-1]] = math.inf
        for before, i, after in zip(order, order[1:], order[2:], strict=False):
            distances[i] += (values[after] - values[before]) / spread
    return distances


def loneliest(front: Sequence[Point], count: int) -> list[int]:
    """Return the places of the `count` members of largest crowding distance; ties to the first."""
    distances = crowding_distance(front)
    return sorted(range(len(front)), key=lambda i: -distances[i])[:count]


def hypervolume(front: Sequence[Point], reference: Point) -> float:
    """Measure what lies between the reference and the front: the volume that some member beats."""
    inside = [point for point in front if all(a > b for a, b in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return max(inside)[0] - reference[0]
    # Slices along the last objective: in each, the points that reach so far span a volume of one less.
    levels = sorted({point[-1] for point in inside})
    return sum(
        (level - below) * hypervolume([p[:-1] for p in inside if p[-1] >= level], reference[:-1])
        for below, level in zip([reference[-1], *levels], levels, strict=False)
    )


def expected_utility(front: Sequence[Point], step: float = 0.01) -> float:
    """Average, over weights of the objectives, the best weighted sum that a member has.

    Weights are those of at least 0 that add up to 1, in multiples of `step`.
    """
    weights = torch.tensor(list(_simplex(len(front[0]), round(1 / step))), dtype=torch.float64) * step
    best = (weights @ torch.tensor(list(front), dtype=torch.float64).T).amax(1)
    return float(best.mean())


def sparsity(front: Sequence[Point]) -> float:
    """Average the squared gaps between neighbours, added up over the objectives; 0 for a single member."""
    if len(front) < 2:
        return 0.0
    ordered = [sorted(values) for values in zip(*front, strict=True)]
    gaps = [(b - a) ** 2 for values in ordered for a, b in zip(values, values[1:], strict=False)]
    return sum(gaps) / (len(front) - 1)


def threshold(start: float, beta: float) -> float:
    """Return what an objective may fall to from a start: start - (1 - beta) |start|.

    C-MORL has beta times the start, which is the same above 0 and cannot be met below (our reading).
    """
    return start - (1 - beta) * abs(start)


def _simplex(size: int, total: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of whole numbers of at least 0 that add up to `total`."""
    if size == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _simplex(size - 1, total - first):
            yield first, *rest
