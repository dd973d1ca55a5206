"""The page of one run: headline numbers, every curve, visualizations, samples and the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.reporting.html.curves import HEADLINES, curves, frontier, time_split
from mmrl.reporting.html.page import document, macros, metric_table, spelled, table
from mmrl.reporting.html.run_folder import RunFolder, read_run
from mmrl.reporting.html.samples import read_samples, samples_section
from mmrl.reporting.rollout_mismatch import mismatch_rows

TILES = 4  # held-out metrics among the headline numbers
COSTS = ("completions/", "seconds_per_prompt", "peak_memory_bytes")  # held-out numbers that are no quality


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run from its folder alone, by default as `report.html` in it."""
    page = run_page(read_run(folder))
    path = output or folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def run_page(run: RunFolder) -> str:
    """Lay out the page of a run."""
    runs = {run.name: run.records}
    weights = weights_of(run.config)
    figures = list(filter(None, (frontier(runs), time_split(run.records), *curves(runs))))
    sections = [
        ("held-out", "Held out", metric_table({"value": run})),
        ("rewards", "Rewards", reward_table(run, weights)),
        ("curves", "Curves", macros().grid(figures) if figures else ""),
        ("engine", "Engine and policy", table(["", "first", "mean", "last"], mismatch_rows(run.records))),
        ("visualizations", "", Markup(run.visualizations)),
        ("samples", "Samples", samples_section(read_samples(run.folder, weights))),
        (
            "configuration",
            "Configuration",
            macros().folded("config.yaml, with all defaults", run.config_text),
        ),
    ]
    startup_checks = map(name_of, (run.config.get("report") or {}).get("startup_checks") or ())
    top = [
        macros().warnings("Warnings during training", run.warnings),
        macros().tiles(list(tiles_of(run))),
        macros().startup_checks(run, ", ".join(startup_checks)),
    ]
    pieces = {key: name_of(run.config[key]) for key in ("policy", "objective") if key in run.config}
    summary = macros().summary(run, pieces, run.config.get("rollout") or {})
    return document(run.name, top, sections, heading=run.name, subtitle=summary)


def name_of(piece: Any) -> str:
    """Return the name of a piece in a plain configuration."""
    match piece:
        case {"name": name}:
            return str(name)
    return str(piece)


def tiles_of(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Give headline numbers as (title, value, comparison)."""
    for name in [name for name in run.metrics if not name.startswith(COSTS)][:TILES]:
        low, high = run.intervals.get(name, (math.nan, math.nan))
        between = f"{spelled(low)} to {spelled(high)}" if math.isfinite(low) else ""
        yield f"{name}, held out", spelled(run.metrics[name]), between
    for name, title in HEADLINES.items():
        first, last = run.ends(name)
        if math.isfinite(last):
            change = f"{spelled(first)} at the start ({last - first:+.2g})"
            yield title, spelled(last), "as at the start" if first == last else change


def weights_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Map the rewards of a plain configuration, by the names that metrics use, to their weights."""
    weights = {}
    for piece in config.get("rewards") or ():
        options = piece if isinstance(piece, Mapping) else {}
        name = options.get("label") or name_of(piece).split(":")[-1].split(".")[-1]
        weights[name] = float(options.get("weight", 1.0))
    return weights


def reward_table(run: RunFolder, weights: Mapping[str, float]) -> Markup:
    """Show of every reward its weight, its course, and its share of the advantage."""
    names = {name.split("/")[1] for record in run.records for name in record if name.startswith("rewards/")}
    rows = []
    for name in sorted(names, key=lambda name: (-abs(weights.get(name, 0.0)), name)):
        ends = {key: run.ends(f"rewards/{name}/{key}") for key in ("mean", "group_std", "advantage_share")}
        share = ends["advantage_share"][1]
        rows.append(
            [
                name,
                f"{weights[name]:g}" if name in weights else "",
                *map(spelled, (*ends["mean"], ends["group_std"][1])),
                f"{round(100 * share)} %" if math.isfinite(share) else "–",
            ]
        )
    return macros().rewards(rows) if rows else Markup()
