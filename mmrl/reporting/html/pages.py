"""The pages of one run and of several runs side by side, each written from folders alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mmrl.config.schema import ConfigError
from mmrl.core.plain_text import whole
from mmrl.reporting.answers import PREDICTIONS
from mmrl.reporting.html.charts import style_of
from mmrl.reporting.html.curves import HEADLINES, curves, frontier, mean_seconds, time_split
from mmrl.reporting.html.layout import document, macros, metric_table, table
from mmrl.reporting.html.predictions import write_predictions_page
from mmrl.reporting.html.prompts import prompts_section
from mmrl.reporting.html.run_folder import RunFolder, find_run, read_run
from mmrl.reporting.html.samples import read_samples, samples_section
from mmrl.reporting.predictions import find_predictions
from mmrl.reporting.rollout_mismatch import mismatch_rows

log = logging.getLogger("mmrl")

TILES = 4  # held-out metrics among the headline numbers
# Held-out numbers that are no quality.
COSTS = ("completions/", "denoising/", "seconds_per_prompt", "peak_memory_bytes")
ABSENT = Markup("<small>not set</small>")
LISTS = {"rewards", "advantage", "metrics", "rollout.engine"}  # of pieces, each of which has its own line


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run from its folder alone, by default as `report.html` in it.

    The answers of its last evaluation have a page of their own in the folder, which this one has a link to.
    """
    output = output or folder / "report.html"
    return write(run_page(read_run(folder), last_answers(folder, output.parent)), output)


def last_answers(folder: Path, start: Path) -> str:
    """Write the page of a run's last evaluation, and return its path from `start`; "" without one."""
    steps = sorted((folder / PREDICTIONS).glob("step-*.parquet"))
    if not steps:
        return ""
    try:
        page = write_predictions_page(find_predictions(steps[-1]), folder / f"{PREDICTIONS}.html")
    except ConfigError as error:  # a damaged file does not cost the page of the run
        log.warning("no page of predictions: %s", error)
        return ""
    return quote(os.path.relpath(page, start))


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write one page that compares the runs in several folders."""
    return write(comparison(named([find_run(folder) for folder in folders])), output)


def write_stages(folders: Sequence[Path], output: Path) -> Path:
    """Write one page of the stages of a run side by side, with curves that go on from stage to stage."""
    return write(stages_page([find_run(folder) for folder in folders]), output)


def write(page: str, path: Path) -> Path:
    """Write a page, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole(page), encoding="utf-8")
    return path


def run_page(run: RunFolder, answers: str = "") -> str:
    """Lay out the page of a run; `answers` is the path of the page of its last evaluation's answers."""
    weights = weights_of(run.config)
    rewards = {name.split("/")[1] for record in run.records for name in record if name.startswith("rewards/")}
    heaviest = sorted(rewards, key=lambda name: (-abs(weights.get(name, 0.0)), name))
    held_out = [name for name in run.metrics if not name.startswith(COSTS)][:TILES]
    figures = (frontier({run.name: run.records}), time_split(run.records), *curves({run.name: run.records}))
    sections = [
        ("held-out", "Held out", metric_table({"value": run}) + macros().answers(answers)),
        ("rewards", "Rewards", macros().rewards(run, weights, heaviest)),
        ("curves", "Curves", macros().grid(figures)),
        ("prompts", "Prompts", prompts_section(run.folder)),
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
        macros().tiles(run, held_out, HEADLINES) if run.records else "",
        macros().startup_checks(run, ", ".join(startup_checks)),
    ]
    pieces = {key: name_of(run.config[key]) for key in ("policy", "objective") if key in run.config}
    summary = macros().summary(run, pieces, run.config.get("rollout") or {})
    return document(run.name, top, sections, heading=run.name, subtitle=summary)


def comparison(runs: Mapping[str, RunFolder], *, in_sequence: str = "") -> str:
    """Lay out the page of several runs: last figures and settings side by side, curves in shared charts.

    Args:
        runs: Runs by the names that the page has for them.
        in_sequence: The name of the run whose stages these are, where each goes on from the one before.
    """
    records = one_after_another(runs) if in_sequence else {name: run.records for name, run in runs.items()}
    chips = [macros().chip(style_of(i)[0], name) for i, name in enumerate(runs)]
    heads = ["", *chips]
    folded = (macros().folded(name, run.config_text) for name, run in runs.items())
    sections = [
        ("held-out", "Held out", metric_table(runs, heads)),
        ("training", "Training", macros().training(runs, HEADLINES, heads)),
        ("differences", "What is set otherwise", differences(runs, heads)),
        ("time", "Where the time goes", time_bars(runs)),
        ("curves", "Curves", macros().grid((frontier(records), *curves(records)))),
        ("configurations", "Configurations", Markup().join(folded)),
    ]
    listed = macros().runs(zip(chips, runs.values(), strict=True), bool(in_sequence))
    title, heading = " · ".join(runs), f"{len(runs)} runs side by side"
    if in_sequence:
        title, heading = in_sequence, f"{in_sequence}: {len(runs)} stage{'s' if len(runs) > 1 else ''}"
    return document(title, (), sections, heading=heading, subtitle=listed)


def stages_page(stages: Sequence[RunFolder]) -> str:
    """Lay out the page of the stages of a run, in their order."""
    home = stages[0].folder.resolve().parent.name
    return comparison({stage.name: stage for stage in stages}, in_sequence=home)


def one_after_another(runs: Mapping[str, RunFolder]) -> dict[str, list[dict[str, Any]]]:
    """Count the steps of every run on from those of the runs before it."""
    counted, taken = {}, 0
    for name, run in runs.items():
        counted[name] = [{**record, "step": record["step"] + taken} for record in run.records]
        taken += run.done
    return counted


def named(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Name runs by their folders, with as much of the path as tells them apart; each run comes once."""
    paths = {run.folder.resolve(): run for run in runs}
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):  # until the ends of all paths differ
        depth += 1
    return {"/".join(path.parts[-depth:]): run for path, run in paths.items()}


def name_of(piece: Any) -> str:
    """Return the name of a piece in a plain configuration."""
    match piece:
        case {"name": name}:
            return str(name)
    return str(piece)


def weights_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Map the rewards of a plain configuration, by the names that metrics use, to their weights."""
    weights = {}
    for piece in config.get("rewards") or ():
        options = flattened(piece, "reward")  # `reward`, `reward.label`, `reward.weight`, ...
        name = options.get("reward.label") or name_of(piece).split(":")[-1].split(".")[-1]
        weights[name] = float(options.get("reward.weight", 1.0))
    return weights


def differences(runs: Mapping[str, RunFolder], heads: Sequence[str]) -> Markup:
    """List every setting that is not the same in all runs."""
    settings = [flattened(run.config) for run in runs.values()]
    if not any(settings):
        return Markup()
    rows = []
    for key in sorted({key for flat in settings for key in flat} - {"output_dir"}):  # differs always
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
