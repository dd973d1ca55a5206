"""The page of several runs: last figures side by side, differing settings, and curves in shared charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.reporting.html.charts import spelled, style_of
from mmrl.reporting.html.curves import curves, frontier, mean_seconds
from mmrl.reporting.html.page import RunFolder, document, duration, figures_table, find_run, macros, table

TRAINED = (
    ("reward", "reward"),
    ("kl", "kl to the reference, nats a step"),
    ("entropy", "entropy, nats a step"),
    ("completions/mean_length", "mean length, steps"),
    ("frac_reward_zero_std", "groups without spread, share"),
    ("clip_ratio/region_mean", "clipped steps, share"),
    ("step_time", "seconds a step"),
    ("time/rollouts_per_second", "rollouts a second"),
)
ABSENT = Markup("<small>not set</small>")
LISTS = {"rewards", "advantage", "metrics", "rollout.engine"}  # of pieces, each of which has its own line


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that compares the runs in several folders."""
    runs = named([find_run(folder) for folder in folders])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(comparison(runs))
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
    figures = [figure for figure in (frontier(records), *curves(records)) if figure]
    texts = {name: run.config_text for name, run in runs.items() if run.config_text}
    sections = [
        (
            "held-out",
            "Held out",
            figures_table({n: (r.metrics, r.intervals) for n, r in runs.items()}, heads),
        ),
        ("training", "Training", _trained(runs, heads)),
        ("differences", "What is set otherwise", _differences(runs, heads)),
        ("time", "Where the time goes", _time(runs)),
        ("curves", "Curves", macros().grid(figures) if figures else ""),
        ("configurations", "Configurations", Markup().join(macros().folded(*pair) for pair in texts.items())),
    ]
    listed = macros().runs([(chip, _summary(run)) for chip, run in zip(chips, runs.values(), strict=True)])
    return document(" · ".join(runs), (), sections, heading=f"{len(runs)} runs side by side", subtitle=listed)


def _summary(run: RunFolder) -> str:
    alarms = sum(warning.get("by") != "doctor" for warning in run.warnings)
    counted = f", {alarms} alarm{'s' * (alarms > 1)}" if alarms else ""
    return f"{run.done} steps, {duration(run.seconds)}{counted}"


def _trained(runs: Mapping[str, RunFolder], heads: Sequence[str]) -> Markup:
    """Show the first and the last numbers of training side by side."""
    rows = []
    for name, title in TRAINED:
        ends = [(run.start(name), run.end(name)) for run in runs.values()]
        form = Markup("{} <small>from {}</small>").format
        if any(math.isfinite(end) for _, end in ends):
            rows.append([title, *(form(*map(spelled, (b, a))) if math.isfinite(b) else "" for a, b in ends)])
    if not rows:
        return Markup()
    return table(heads, rows) + macros().note("Means over the last tenth of the steps, and over the first.")


def _differences(runs: Mapping[str, RunFolder], heads: Sequence[str]) -> Markup:
    """List every setting that is not the same in all runs."""
    flat = [flattened(run.config) for run in runs.values()]
    keys = sorted({key for settings in flat for key in settings} - {"output_dir"})
    rows = [
        [key, *(str(settings[key]) if key in settings else ABSENT for settings in flat)]
        for key in keys
        if any(settings.get(key, ...) != flat[0].get(key, ...) for settings in flat)
    ]
    if not any(flat):
        return Markup()
    return table(heads, rows, kind="value") if rows else macros().note("Nothing but their folders.")


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """Write nested settings as dotted names; a piece without options equals its bare name."""
    match value:
        case {"name": name, **options} if place:
            inner = [(f"{place}.{key}", option) for key, option in options.items()]
            flat = {place: name}
        case Mapping() if value:
            inner = [(f"{place}.{key}" if place else str(key), option) for key, option in value.items()]
            flat = {}
        case list() | tuple() if place in LISTS or any(isinstance(item, Mapping | list) for item in value):
            inner = [(f"{place}[{i}]", item) for i, item in enumerate(value)]
            flat = {}
        case _:
            return {place: value} if place else {}
    for key, option in inner:
        flat |= flattened(option, key)
    return flat


def _time(runs: Mapping[str, RunFolder]) -> Markup:
    """Draw the mean seconds of a step as one stacked bar a run, all to one scale."""
    split = {name: parts for name, run in runs.items() if (parts := mean_seconds(run.records))}
    if not split:
        return Markup()
    colours = {
        part: style_of(i)[0] for i, part in enumerate(dict.fromkeys(p for s in split.values() for p in s))
    }
    longest = max(sum(parts.values()) for parts in split.values())
    rows = []
    for name, parts in split.items():
        bar = [(p, f"{spelled(v)} s", f"{100 * v / longest:.2f}", colours[p]) for p, v in parts.items()]
        rows.append((name, f"{spelled(sum(parts.values()))} s", bar))
    bars = macros().bars(rows, [(colour, part, None) for part, colour in colours.items()])
    return macros().figure("seconds a step, mean over all steps", bars)
