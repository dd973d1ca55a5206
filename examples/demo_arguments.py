"""Command-line arguments that all demos share."""

from __future__ import annotations

import argparse
import os


def demo_parser(
    module: str, doc: str | None, output: str, changed: str, *, seeds: int = 0, fresh: str = "nothing"
) -> argparse.ArgumentParser:
    """Make a parser with `--output`, `--seed`, overrides, and for several runs `--seeds`, `--jobs`.

    Args:
        module: Name of the demo's folder.
        doc: Docstring of the demo, whose headline is the description.
        output: Default folder of the results.
        changed: Which runs the overrides change.
        seeds: Default number of runs; 0: a demo of one run.
        fresh: What every run starts from.
    """
    parser = argparse.ArgumentParser(prog=f"examples.{module}.demo", description=(doc or "").split("\n\n")[0])
    parser.add_argument("--output", default=output, help=f"folder of the results (default: {output})")
    parser.add_argument("--seed", type=int, default=0, help="of the first run" if seeds else "of the run")
    if seeds:
        runs = f"number of runs, each from {fresh} (default: {seeds})"
        parser.add_argument("--seeds", type=int, default=seeds, help=runs)
    if seeds > 1:
        jobs = "trainings at the same time, a core each (default: one a core)"
        parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help=jobs)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"changes to {changed}")
    return parser
