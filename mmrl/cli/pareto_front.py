"""Command `mmrl pareto-front`: shows the Pareto front of checkpoints for several evaluation metrics.

All metrics are maximised. C-MORL (arXiv 2410.02236) fills gaps in a Pareto front by further training
from the members of the front with the largest crowding distance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, nearest

Point = tuple[float, ...]  # one value per objective


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

    Every evaluation of the runs is a point. Members of the front next to the largest gaps are marked. To fill
    a gap, continue training from a marked member for one metric at a time, while the advantage `barrier`
    holds the other metrics above their thresholds (C-MORL, arXiv 2410.02236). With a reference point, the
    command also prints the hypervolume (larger is better).
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
    """Return a mapping of evaluations, named "run step n", to their values of the metrics."""
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
    """Return the indices of non-dominated points; of equal points only the first.

    Points with a value that is not finite, or that is below the `reference`, are left out.
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
    """Return the crowding distance of each member; infinite for the smallest and largest per objective.

    It is the sum of (next - previous) / (largest - smallest) over the objectives. An objective with equal
    values adds 0. Of two equal values, the first counts as smaller.
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
    """Return the indices of the `count` members with the largest crowding distance; ties go to the first."""
    distances = crowding_distance(front)
    return sorted(range(len(front)), key=lambda i: -distances[i])[:count]


def hypervolume(front: Sequence[Point], reference: Point) -> float:
    """Compute the volume that the front dominates, bounded below by the reference point."""
    inside = [point for point in front if all(a > b for a, b in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return max(inside)[0] - reference[0]
    # Cut the volume into slices along the last objective. A slice's cross-section is the hypervolume of the
    # points that reach it, in the other objectives.
    levels = sorted({point[-1] for point in inside})
    return sum(
        (level - below) * hypervolume([p[:-1] for p in inside if p[-1] >= level], reference[:-1])
        for below, level in zip([reference[-1], *levels], levels, strict=False)
    )


def expected_utility(front: Sequence[Point], step: float = 0.01) -> float:
    """Compute the largest weighted sum of objectives over the members, averaged over weight vectors.

    The weight vectors are all vectors of non-negative multiples of `step` that add up to 1.
    """
    import torch

    # Stars and bars: `size` - 1 bars at `last` positions split the multiples of `step` into `size` weights.
    size = len(front[0])
    last = round(1 / step) + size - 1
    parts = [pairwise((-1, *bars, last)) for bars in combinations(range(last), size - 1)]
    weights = torch.tensor([[b - a - 1 for a, b in part] for part in parts], dtype=torch.float64) * step
    best = (weights @ torch.tensor(list(front), dtype=torch.float64).T).amax(1)
    return float(best.mean())


def sparsity(front: Sequence[Point]) -> float:
    """Compute the mean squared gap between neighbours, summed over objectives; 0 for a single member."""
    if len(front) < 2:
        return 0.0
    ordered = [sorted(values) for values in zip(*front, strict=True)]
    gaps = [(b - a) ** 2 for values in ordered for a, b in zip(values, values[1:], strict=False)]
    return sum(gaps) / (len(front) - 1)


def threshold(start: float, beta: float) -> float:
    """Return the lower limit of an objective in further training: start - (1 - beta) |start|.

    C-MORL uses beta * start, which is the same for start > 0, but above the start if start < 0 (our reading).
    """
    return start - (1 - beta) * abs(start)
