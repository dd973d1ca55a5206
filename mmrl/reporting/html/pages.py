"""HTML pages of one run, of several runs side by side, and of the stages of a run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from mmrl.config.schema import ConfigError
from mmrl.core.plain_text import whole
from mmrl.reporting.answers import PREDICTIONS
from mmrl.reporting.html.charts import style_of
from mmrl.reporting.html.curves import HEADLINES, curves, time_split
from mmrl.reporting.html.exports import export_figures
from mmrl.reporting.html.layout import document, macros, metric_table, table
from mmrl.reporting.html.predictions import write_predictions_page
from mmrl.reporting.html.run_folder import RunFolder, find_run, flattened, read_run
from mmrl.reporting.html.run_groups import Column, cost_rows, group_runs, paired_rows
from mmrl.reporting.html.samples import read_samples, samples_section
from mmrl.reporting.predictions import find_predictions
from mmrl.reporting.rollout_mismatch import mismatch_rows

log = logging.getLogger("mmrl")

TILES = 4  # maximum number of held-out metrics at the top of the page
# Prefixes of held-out metrics about costs or lengths, which are not shown at the top.
COSTS = ("completions/", "denoising/", "seconds_per_prompt", "peak_memory_bytes")
ABSENT = Markup("<small>not set</small>")


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run, by default `report.html` in its folder.

    The page links to a second page, with the answers of the last evaluation.
    """
    output = output or folder / "report.html"
    return write(run_page(read_run(folder), last_answers(folder, output.parent)), output)


def last_answers(folder: Path, start: Path) -> str:
    """Write the page of a run's last predictions; return its path relative to `start`, or "" without any."""
    steps = sorted((folder / PREDICTIONS).glob("step-*.parquet"))
    if not steps:
        return ""
    try:
        page = write_predictions_page(find_predictions(steps[-1]), folder / f"{PREDICTIONS}.html")
    except ConfigError as error:  # a damaged file must not prevent the page of the run
        log.warning("no page of predictions: %s", error)
        return ""
    return quote(os.path.relpath(page, start))


def write_comparison(
    folders: Sequence[Path], output: Path, *, stages: bool = False, group: Sequence[str] = ()
) -> Path:
    """Write one page that compares runs, or the stages of one run; see `comparison`.

    The figures of runs are also written as SVG and CSV, into the folder `{page}_figures` beside the page.
    """
    runs = [find_run(folder) for folder in folders]
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise ConfigError("the same run is named twice; name each run once")
    page = comparison(runs, stages=stages, group=group)
    if not stages:
        columns = group_runs(named(runs), group)
        records = {name: column.records for name, column in columns.items()}
        export_figures(records, output.with_name(f"{output.stem}_figures"))
    return write(page, output)


def write(page: str, path: Path) -> Path:
    """Write a page, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole(page), encoding="utf-8")
    return path


def run_page(run: RunFolder, answers: str = "") -> str:
    """Render the page of a run; `answers` is the path of the page with the run's last predictions."""
    weights = weights_of(run.config)
    means = (re.fullmatch("rewards/(.*)/mean", name) for record in run.records for name in record)
    rewards = {mean[1] for mean in means if mean}  # not `rewards/chosen` of a comparison
    heaviest = sorted(rewards, key=lambda name: (-abs(weights.get(name, 0.0)), name))
    held_out = [name for name in run.metrics if not name.startswith(COSTS)][:TILES]
    figures = (time_split(run.records), *curves({run.name: run.records}))
    sections = [
        ("held-out", "Held out", metric_table({"value": run}) + macros().answers(answers)),
        ("rewards", "Rewards", macros().rewards(run, weights, heaviest)),
        ("curves", "Curves", macros().grid(figures)),
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


def comparison(runs: Sequence[RunFolder], *, stages: bool = False, group: Sequence[str] = ()) -> str:
    """Render the page that compares runs: tables of metrics and settings, and shared charts.

    Args:
        runs: The runs; duplicates are shown once.
        stages: Whether the runs are consecutive stages of one run. Step numbers then continue from stage to
            stage, and the page links to the pages of the stages.
        group: Settings by which runs are grouped; empty: runs that differ only in their seed form a group,
            which is shown as mean, and as range from the lowest to the highest run.
    """
    single = named(runs)
    named_runs = single if stages else group_runs(single, group)
    records = steps_in_sequence(single) if stages else {name: r.records for name, r in named_runs.items()}
    chips = [macros().chip(style_of(i)[0], name) for i, name in enumerate(named_runs)]
    heads = ["", *chips]
    folded = (macros().folded(name, run.config_text) for name, run in single.items())
    without = [name for name, run in single.items() if not run.metrics]
    missing = macros().note(f"Without an evaluation: {', '.join(without)}.") if without else Markup()
    sections = [
        ("held-out", "Held out", metric_table(named_runs, heads) + missing),
        ("paired", "Paired differences", Markup() if stages else paired(named_runs)),
        ("training", "Training", macros().training(named_runs, HEADLINES, heads)),
        ("differences", "Different settings", differences(named_runs, heads)),
        ("curves", "Curves", macros().grid(curves(records))),
        ("origin", "Origin and cost", origin(single)),
        ("configurations", "Configurations", Markup().join(folded)),
    ]
    listed = macros().runs(zip(chips, named_runs.values(), strict=True), stages)
    title, heading = " · ".join(named_runs), f"{len(single)} runs side by side"
    if stages:
        title = runs[0].folder.resolve().parent.name
        heading = f"{title}: {len(runs)} stage{'s' if len(runs) > 1 else ''}"
    return document(title, (), sections, heading=heading, subtitle=listed)


def paired(columns: Mapping[str, Column]) -> Markup:
    """Render the differences in evaluation metrics of the other runs or groups from the first, by prompt."""
    if len(columns) < 2:
        return Markup()
    rows, notes = paired_rows(columns)
    heads = ["mean over prompts", "run", f"minus {next(iter(columns))} (95 %)", "prompts", "runs"]
    about = "Bootstrap intervals over prompts, and over runs where a group has several." if rows else ""
    return table(heads, rows) + macros().note(" ".join([about, *(f"{note}." for note in notes)]))


def origin(runs: Mapping[str, RunFolder]) -> Markup:
    """Render the table of commit, packages, devices, seconds and energy of every run."""
    titles, rows, notes = cost_rows(runs)
    return table(titles, rows) + macros().note(f"Seconds and joules of reported steps; {'; '.join(notes)}.")


def steps_in_sequence(runs: Mapping[str, RunFolder]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of consecutive runs, with step numbers that continue from run to run."""
    records, taken = {}, 0
    for name, run in runs.items():
        records[name] = [{**record, "step": record["step"] + taken} for record in run.records]
        taken += run.done
    return records


def named(runs: Sequence[RunFolder]) -> dict[str, RunFolder]:
    """Map unique names to runs: the folder name, with as many parent folders as needed."""
    paths = {run.folder.resolve(): run for run in runs}
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return {"/".join(path.parts[-depth:]): run for path, run in paths.items()}


def name_of(piece: Any) -> str:
    """Return the name of a piece in a plain configuration."""
    match piece:
        case {"name": name}:
            return str(name)
    return str(piece)


def weights_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the rewards in a plain configuration, keyed by their names in the metrics."""
    weights = {}
    for piece in config.get("rewards") or ():
        options = flattened(piece, "reward")  # `reward`, `reward.label`, `reward.weight`, ...
        name = options.get("reward.label") or name_of(piece).split(":")[-1].split(".")[-1]
        weights[name] = float(options.get("reward.weight", 1.0))
    return weights


def differences(runs: Mapping[str, Column], heads: Sequence[str]) -> Markup:
    """Render a table of the settings that differ between runs."""
    settings = [flattened(run.config) for run in runs.values()]
    if not any(settings):
        return Markup()
    rows = []
    for key in sorted({key for flat in settings for key in flat} - {"output_dir"}):
        values = [flat.get(key, ABSENT) for flat in settings]
        if any(value != values[0] for value in values):
            rows.append([key, *(value if value is ABSENT else str(value) for value in values)])
    return table(heads, rows, kind="value") if rows else macros().note("Only their folders.")
