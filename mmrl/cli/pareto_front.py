"""Command `mmrl pareto-front`: Pareto front of checkpoints in several metrics."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, nearest


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
    from mmrl.reporting import fronts

    if given.reference and len(given.reference) != len(given.metrics):
        raise ConfigError(f"--reference wants {len(given.metrics)} values, one a metric, in their order")
    reference = tuple(given.reference) if given.reference else None
    points = evaluated(given.runs, given.metrics)
    names, values = list(points), list(points.values())
    places = fronts.front_of(values, reference)
    if not places:
        raise ConfigError(f"none of {len(points)} evaluations is finite and at least the reference")
    front = [values[i] for i in places]
    lonely, distances = fronts.loneliest(front, given.select), fronts.crowding_distance(front)
    rows = [
        [
            f"{names[place]}{' *' if i in lonely else ''}",
            *(f"{value:.6g}" for value in front[i]),
            f"{distances[i]:.3g}",
            *(f"{fronts.threshold(value, given.beta):.6g}" for value in front[i]),
        ]
        for i, place in enumerate(places)
    ]
    thresholds = [f"threshold of {name}" for name in given.metrics]
    print_table(["checkpoint", *given.metrics, "crowding distance", *thresholds], *rows)
    print(f"* largest gaps around; {len(front)} of {len(points)} evaluations are on the front")
    if reference:
        print(f"hypervolume {fronts.hypervolume(front, reference):.6g}")


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
