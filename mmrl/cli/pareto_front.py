"""The command that shows the Pareto front of checkpoints in several metrics of their evaluations.

All metrics are maximised. C-MORL (arXiv 2410.02236) fills the gaps of a front by further training from its
members with the largest crowding distance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, nearest

Point = tuple[float, ...]  # a value of every objective


@command(
    argument("runs", nargs="+", type=Path, metavar="RUN", help="the output_dir of a run with evaluations"),
    argument(
        "--metrics", nargs="+", required=True, metavar="NAME", help="metrics to maximise, as in metrics.jsonl"
    ),
    argument(
        "--reference",
        nargs="+",
        type=float,
        metavar="VALUE",
        help="reference point: the lowest useful value of every metric",
    ),
    argument("--select", type=int, default=5, help="number of members to mark (default: 5)"),
    argument("--beta", type=float, default=0.9, help="share of a metric that must be kept (default: 0.9)"),
    examples=(
        "mmrl pareto-front runs/w0 runs/w50 runs/w100 --metrics eval_reward eval_length --reference 0 0",
    ),
)
def pareto_front(given: argparse.Namespace) -> None:
    """Show the Pareto front of evaluated checkpoints in several metrics, and the gaps in it.

    Every evaluation of the runs is a point. Members with the largest gaps around them are marked: training
    on from one, one metric at a time with the others held above their thresholds by the advantage `barrier`,
    fills the gaps (C-MORL, arXiv 2410.02236). With a reference point it prints the hypervolume (larger is
    better).
    """
    if given.reference and len(given.reference) != len(given.metrics):
        raise ConfigError(f"--reference wants {len(given.metrics)} values, one a metric, in their order")
    reference = tuple(given.reference) if given.reference else None
    points = evaluated(given.runs, given.metrics)
    names, values = list(points), list(points.values())
    places = front_of(values, reference)
    if not places:
        raise ConfigError(f"none of {len(points)} evaluations is finite and at least the reference")
    front = [values[i] for i in places]
    lonely, distances = loneliest(front, given.select), crowding_distance(front)
    rows = [
        [
            f"{names[place]}{' *' if i in lonely else ''}",
            *(f"{value:.6g}" for value in front[i]),
            f"{distances[i]:.3g}",
            *(f"{threshold(value, given.beta):.6g}" for value in front[i]),
        ]
        for i, place in enumerate(places)
    ]
    thresholds = [f"threshold of {name}" for name in given.metrics]
    print_table(["checkpoint", *given.metrics, "crowding distance", *thresholds], *rows)
    print(f"* largest gaps around; {len(front)} of {len(points)} evaluations are on the front")
    if reference:
        print(f"hypervolume {hypervolume(front, reference):.6g}")
    print(f"expected utility {expected_utility(front):.6g}, sparsity {sparsity(front):.6g}")


def evaluated(runs: list[Path], metrics: list[str]) -> dict[str, tuple[float, ...]]:
    """Values of the metrics in every evaluation, by run and step."""
    from mmrl.reporting.metrics import Journal, steps_taken

    points: dict[str, tuple[float, ...]] = {}
    for run in runs:
        records = Journal(run).read()
        complete = [record for record in records if all(name in record for name in metrics)]
        if not complete:
            measured = sorted({name for record in records for name in record if name.startswith("eval_")})
            missing = next((name for name in metrics if name not in measured), metrics[0])
            hint = nearest(missing, measured) or f"there are {', '.join(measured) or 'no evaluations'}"
            raise ConfigError(f"'{run}' has no record with {', '.join(metrics)}; {hint}")
        points |= {f"{run} step {steps_taken(r)}": tuple(r[name] for name in metrics) for r in complete}
    return points


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
    import torch

    # Stars and bars: `size` - 1 bars among `last` places cut the multiples of `step` into `size` parts.
    size = len(front[0])
    last = round(1 / step) + size - 1
    parts = [pairwise((-1, *bars, last)) for bars in combinations(range(last), size - 1)]
    weights = torch.tensor([[b - a - 1 for a, b in part] for part in parts], dtype=torch.float64) * step
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
