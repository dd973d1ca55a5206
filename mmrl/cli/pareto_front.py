"""The command that shows the Pareto front of checkpoints in several metrics of their evaluations."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.command import argument, command, print_table
from mmrl.config.loading import ConfigError, nearest


@command(
    argument("runs", nargs="+", type=Path, metavar="RUN", help="the output_dir of a run with evaluations"),
    argument("--metrics", nargs="+", required=True, metavar="NAME", help="to maximise, as in metrics.jsonl"),
    argument("--reference", nargs="+", type=float, metavar="VALUE", help="the least of every metric"),
    argument("--select", type=int, default=5, help="the loneliest members that are marked (default: 5)"),
    argument("--beta", type=float, default=0.9, help="share that a threshold keeps (default: 0.9)"),
    examples=(
        "mmrl pareto-front runs/w0 runs/w50 runs/w100 --metrics eval_reward eval_length --reference 0 0",
    ),
)
def pareto_front(given: argparse.Namespace) -> None:
    """Show which evaluated checkpoints no other beats in several metrics, and where the front has gaps.

    Every evaluation of the runs is a point. Marked members are the loneliest: training on from them, one
    metric at a time with the others held by the advantage `barrier`, fills the gaps of the front (C-MORL,
    arXiv 2410.02236); the table has the thresholds for that. The hypervolume (larger is better) needs a
    reference.
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
    print(f"* the loneliest; {len(front)} of {len(points)} evaluations are on the front")
    if reference:
        print(f"hypervolume {fronts.hypervolume(front, reference):.6g}")
    print(f"expected utility {fronts.expected_utility(front):.6g}, sparsity {fronts.sparsity(front):.6g}")


def evaluated(runs: list[Path], metrics: list[str]) -> dict[str, tuple[float, ...]]:
    """Read all evaluations of runs that have the metrics, by run and step."""
    from mmrl.reporting.metrics import Journal, steps_taken

    points: dict[str, tuple[float, ...]] = {}
    for run in runs:
        records = Journal(run).read()
        found = [record for record in records if all(name in record for name in metrics)]
        if not found:
            known = sorted({name for record in records for name in record if name.startswith("eval_")})
            wanted = next(name for name in metrics if name not in known or not found)
            hint = nearest(wanted, known) or f"there are {', '.join(known) or 'no evaluations'}"
            raise ConfigError(f"'{run}' has no record with {', '.join(metrics)}; {hint}")
        points |= {f"{run} step {steps_taken(r)}": tuple(r[name] for name in metrics) for r in found}
    return points
