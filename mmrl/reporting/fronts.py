"""Pareto fronts of maximised objectives: members, crowding distances, hypervolume, thresholds.

C-MORL (arXiv 2410.02236) fills the gaps of a front by training on from the members with most room around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]  # one value per objective


def front_of(points: Sequence[Point], reference: Point | None = None) -> list[int]:
    """Indices of the points that no other point dominates; of equal points the first.

    A point that is not finite, or below the `reference` in an objective, is never a member.
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
    """Distance between the neighbours of each member; infinite for the extremes of an objective.

    Sum over objectives of (next - previous) / (largest - smallest). An objective with one value adds 0; of
    equal values the first counts as the smaller one.
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
    """Indices of the `count` members with the largest crowding distance; of ties the first."""
    distances = crowding_distance(front)
    return sorted(range(len(front)), key=lambda i: -distances[i])[:count]


def hypervolume(front: Sequence[Point], reference: Point) -> float:
    """Volume between the reference point and the front."""
    inside = [point for point in front if all(a > b for a, b in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return max(inside)[0] - reference[0]
    # Slice along the last objective; the points that reach a slice span a volume of one dimension less.
    levels = sorted({point[-1] for point in inside})
    return sum(
        (level - below) * hypervolume([p[:-1] for p in inside if p[-1] >= level], reference[:-1])
        for below, level in zip([reference[-1], *levels], levels, strict=False)
    )


def threshold(start: float, beta: float) -> float:
    """Lowest value that an objective may fall to: start - (1 - beta) |start|.

    Our reading: C-MORL has beta times the start, which is equal above 0 and cannot be met below 0.
    """
    return start - (1 - beta) * abs(start)
