"""The page of several runs: their last figures side by side, what their configurations do not share, and
their curves in one picture each."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.reporting.html.charts import bars, spelled
from mmrl.reporting.html.curves import curves, figure, frontier, mean_seconds
from mmrl.reporting.html.parts import chip, document, duration, figures_table, folded, grid, section, table
from mmrl.reporting.html.reading import Found, find_run

TRAINED = (
    ("reward", "reward"),
    ("kl", "kl to the reference, nats a step"),
    ("entropy", "entropy, nats a step"),
    ("completions/mean_length", "mean length, steps"),
    ("frac_reward_zero_std", "groups that say nothing, share"),
    ("clip_ratio/region_mean", "clipped steps, share"),
    ("step_time", "seconds a step"),
    ("time/rollouts_per_second", "rollouts a second"),
)
ABSENT = "<small>not set</small>"


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that compares the runs in several folders."""
    runs = named([find_run(folder) for folder in folders])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(comparison(runs))
    return output


def named(found: Sequence[Found]) -> dict[str, Found]:
    """Name runs by their folders, with as much of the path as tells them apart."""
    paths = [run.folder.resolve() for run in found]
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        # The same run twice would lie over itself in every picture.
        found = [run for i, run in enumerate(found) if paths[i] not in paths[:i]]
        paths = list(dict.fromkeys(paths))
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {"/".join(path.parts[-depth:]): run for path, run in zip(paths, found, strict=True)}


def comparison(runs: Mapping[str, Found]) -> str:
    """Lay out the page."""
    records = {name: run.records for name, run in runs.items()}
    held_out = {name: (run.metrics, run.intervals) for name, run in runs.items() if run.metrics}
    measured = {name: held_out.get(name, ({}, {})) for name in runs}
    sections = {
        "held-out": section(
            "Held out", figures_table(measured, chips=True) if held_out else "", name="held-out"
        ),
        "training": section("Training", _trained(runs), name="training"),
        "differences": section("What is set otherwise", _differences(runs), name="differences"),
        "time": section("Where the time goes", _time(runs), name="time"),
        "curves": section("Curves", grid([frontier(records), *curves(records)]), name="curves"),
        "configurations": section("Configurations", _configurations(runs), name="configurations"),
    }
    links = "".join(f"<a href='#{name}'>{name}</a>" for name, inside in sections.items() if inside)
    head = f"<h1>{len(runs)} runs side by side</h1>{_listed(runs)}<nav>{links}</nav>"
    return document(" · ".join(runs), [head, *sections.values()])


def _listed(runs: Mapping[str, Found]) -> str:
    lines = []
    for i, (name, run) in enumerate(runs.items()):
        alarms = sum(one.get("by") != "doctor" for one in run.warnings)
        seconds = duration(sum(record.get("step_time", 0.0) for record in run.records))
        words = f"{run.done} steps, {seconds}" + (f", {alarms} alarm{'s' * (alarms > 1)}" if alarms else "")
        lines.append(f"<li>{chip(i)}<b>{html.escape(name)}</b> <small>{words}</small></li>")
    return f"<ul class=legend style='flex-direction:column'>{''.join(lines)}</ul>"


def _heads(runs: Mapping[str, Found]) -> list[str]:
    return ["", *(chip(i) + html.escape(name) for i, name in enumerate(runs))]


def _trained(runs: Mapping[str, Found]) -> str:
    """Set the first and the last numbers of training side by side."""
    rows = []
    for name, title in TRAINED:
        cells = [
            f"{spelled(run.end(name))} <small>from {spelled(run.start(name))}</small>"
            if math.isfinite(run.end(name))
            else ""
            for run in runs.values()
        ]
        if any(cells):
            rows.append([html.escape(title), *cells])
    note = "<p class=note>Means over the last tenth of the steps, and over the first.</p>"
    return table(_heads(runs), rows) + note if rows else ""


def _differences(runs: Mapping[str, Found]) -> str:
    """List every setting that is not the same in all runs."""
    flat = [flattened(run.config) for run in runs.values()]
    keys = sorted({key for one in flat for key in one} - {"output_dir"})
    rows = [
        [html.escape(key), *(html.escape(str(one[key])) if key in one else ABSENT for one in flat)]
        for key in keys
        if any(one.get(key, ...) != flat[0].get(key, ...) for one in flat)
    ]
    if not any(run.config for run in runs.values()):
        return ""
    if not rows:
        return "<p class=note>Nothing but their folders.</p>"
    return table(_heads(runs), rows, value="value")


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """Write nested settings as dotted names; a piece without options is the same as its name."""
    match value:
        case {"name": name, **options} if place:
            inner = {f"{place}.{key}": option for key, option in options.items()}
            return {place: name} | _joined(flattened(option, key) for key, option in inner.items())
        case Mapping() if value:
            return _joined(
                flattened(one, f"{place}.{key}" if place else str(key)) for key, one in value.items()
            )
        case list() | tuple() if any(isinstance(one, Mapping | list) for one in value) or place in LISTS:
            return _joined(flattened(one, f"{place}[{i}]") for i, one in enumerate(value))
    return {place: value}


LISTS = {"rewards", "advantage", "metrics", "rollout.engine"}  # of pieces, of which each has its own line


def _joined(parts) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _time(runs: Mapping[str, Found]) -> str:
    parts = {name: split for name, run in runs.items() if (split := mean_seconds(run.records))}
    return figure("seconds a step, mean over all steps", bars(parts, unit="s")) if parts else ""


def _configurations(runs: Mapping[str, Found]) -> str:
    """Show every configuration in full, folded."""
    return "".join(
        folded(name, f"<pre>{html.escape((run.folder / 'config.yaml').read_text())}</pre>")
        for name, run in runs.items()
        if (run.folder / "config.yaml").exists()
    )
