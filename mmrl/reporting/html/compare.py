"""The page of several runs: last figures side by side, differing settings, and curves in shared charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.reporting.html.charts import style_of
from mmrl.reporting.html.curves import HEADLINES, curves, frontier, mean_seconds
from mmrl.reporting.html.page import document, macros, metric_table, spelled, table
from mmrl.reporting.html.run_folder import RunFolder, find_run

ABSENT = Markup("<small>not set</small>")
LISTS = {"rewards", "advantage", "metrics", "rollout.engine"}  # of pieces, each of which has its own line


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that compares the runs in several folders."""
    page = comparison(named([find_run(folder) for folder in folders]))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page)
    return output


def named(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Name runs by their folders, with as much of the path as tells them apart; each run comes once."""
    paths = {run.folder.resolve(): run for run in runs}
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {"/".join(path.parts[-depth:]): run for path, run in paths.items()}


def comparison(runs: Mapping[str, RunFolder]) -> str:
    """Lay out the page of several runs."""
    records = {name: run.records for name, run in runs.items()}
    chips = [macros().chip(style_of(i)[0], name) for i, name in enumerate(runs)]
    heads = ["", *chips]
    figures = list(filter(None, (frontier(records), *curves(records))))
    folded = (macros().folded(name, run.config_text) for name, run in runs.items() if run.config_text)
    sections = [
        ("held-out", "Held out", metric_table(runs, heads)),
        ("training", "Training", training_table(runs, heads)),
        ("differences", "What is set otherwise", differences(runs, heads)),
        ("time", "Where the time goes", time_bars(runs)),
        ("curves", "Curves", macros().grid(figures) if figures else ""),
        ("configurations", "Configurations", Markup().join(folded)),
    ]
    listed = macros().runs(zip(chips, runs.values(), strict=True))
    return document(" · ".join(runs), (), sections, heading=f"{len(runs)} runs side by side", subtitle=listed)


def training_table(runs: Mapping[str, RunFolder], heads: Sequence[str]) -> Markup:
    """Show the first and the last numbers of training side by side."""
    rows = []
    for name, title in HEADLINES.items():
        ends = [run.ends(name) for run in runs.values()]
        if any(math.isfinite(last) for _, last in ends):
            small = macros().with_small
            cells = (small(spelled(b), f"from {spelled(a)}") if math.isfinite(b) else "" for a, b in ends)
            rows.append([title, *cells])
    note = macros().note("Means over the last tenth of the steps, and over the first.")
    return table(heads, rows) + note if rows else Markup()


def differences(runs: Mapping[str, RunFolder], heads: Sequence[str]) -> Markup:
    """List every setting that is not the same in all runs."""
    settings = [flattened(run.config) for run in runs.values()]
    if not any(settings):
        return Markup()
    rows = []
    for key in sorted({key for flat in settings for key in flat} - {"output_dir"}):
        values = [flat.get(key, ABSENT) for flat in settings]
        if any(value != values[0] for value in values):
            rows.append([key, *(value if value is ABSENT else str(value) for value in values)])
    return table(heads, rows, kind="value") if rows else macros().note("Nothing but their folders.")


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """Write nested settings as dotted names; a piece without options equals its bare name."""
    match value:
        case {"name": name, **options} if place:
            return {place: name} | (flattened(options, place) if options else {})
        case Mapping() if value:
            inner = {f"{place}.{key}" if place else str(key): option for key, option in value.items()}
        case list() | tuple() if place in LISTS or any(isinstance(item, Mapping | list) for item in value):
            inner = {f"{place}[{i}]": item for i, item in enumerate(value)}
        case _:
            return {place: value} if place else {}
    return {key: leaf for at, item in inner.items() for key, leaf in flattened(item, at).items()}


def time_bars(runs: Mapping[str, RunFolder]) -> Markup:
    """Draw the mean seconds of a step as one stacked bar a run, all to one scale."""
    split = {name: parts for name, run in runs.items() if (parts := mean_seconds(run.records))}
    if not split:
        return Markup()
    names = dict.fromkeys(part for parts in split.values() for part in parts)
    colours = {part: style_of(i)[0] for i, part in enumerate(names)}
    longest = max(sum(parts.values()) for parts in split.values())
    return macros().figure("seconds a step, mean over all steps", macros().bars(split, colours, longest))
