"""The page of one run: headline numbers, every curve, visualizations, samples and the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.reporting.html.charts import spelled
from mmrl.reporting.html.curves import curves, frontier, mean_seconds, time_split
from mmrl.reporting.html.page import RunFolder, document, duration, figures_table, macros, read_run, table
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
    samples = read_samples(run.folder, dict(rewards_of(run.config)))
    held_out = figures_table({"value": (run.metrics, run.intervals)}) if run.metrics else Markup()
    figures = [figure for figure in (frontier(runs), time_split(run.records), *curves(runs)) if figure]
    config = macros().folded("config.yaml, with all defaults", run.config_text) if run.config_text else ""
    mismatch = table(["", "first", "mean", "last"], mismatch_rows(run.records))
    sections = [
        ("held-out", "Held out", held_out),
        ("rewards", "Rewards", _rewards(run)),
        ("curves", "Curves", macros().grid(figures) if figures else ""),
        ("engine", "Engine and policy", mismatch),
        ("visualizations", "", Markup(run.visualizations)),
        ("samples", "Samples", samples_section(samples)),
        ("configuration", "Configuration", config),
    ]
    tiles = macros().tiles(list(_tiles(run))) if run.records else ""
    top = [_warnings(run), tiles, _startup_checks(run)]
    return document(run.name, top, sections, heading=run.name, subtitle=macros().note(_summary(run)))


# ---- on top


def _summary(run: RunFolder) -> str:
    config = run.config
    most = config.get("max_steps")
    words = [f"{run.done}{f' of {most}' if most else ''} steps taken, {len(run.records)} steps reported"]
    if run.seconds:
        words.append(f"{duration(run.seconds)} in reported steps")
    words += [f"{key} {_name_of(config[key])}" for key in ("policy", "objective") if key in config]
    rollout = config.get("rollout") or {}
    if "num_prompts" in rollout and "num_generations" in rollout:
        words.append(f"{rollout['num_prompts']} prompts × {rollout['num_generations']} rollouts a step")
    words += [f"seed {config['seed']}"] if "seed" in config else []
    return " · ".join(words)


def _name_of(piece: Any) -> str:
    match piece:
        case {"name": name}:
            return str(name)
    return str(piece)


def _warnings(run: RunFolder) -> str:
    texts = [warning["text"] for warning in run.warnings if warning.get("by") != "doctor"]
    return macros().warnings("Alarms", texts, "alarms") if texts else ""


def _startup_checks(run: RunFolder) -> str:
    """Show what the checks of the first step found; nothing where none was configured."""
    texts = [warning["text"] for warning in run.warnings if warning.get("by") == "doctor"]
    if texts:
        return macros().warnings("The doctor, at step 1", texts, "doctor")
    checks = (run.config.get("report") or {}).get("startup_checks") or []
    if not checks or not run.records:
        return ""
    names = ", ".join(map(_name_of, checks))
    return macros().note(f"The doctor looked at step 1 ({names}) and found nothing wrong.")


def _tiles(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Give headline numbers as (title, value, comparison)."""
    yield "reward, last tenth", spelled(run.end("reward")), _change(run, "reward")
    for name in [name for name in run.metrics if not name.startswith(COSTS)][:TILES]:
        low, high = run.intervals.get(name, (math.nan, math.nan))
        between = f"{spelled(low)} to {spelled(high)}" if math.isfinite(low) else ""
        yield f"{name}, held out", spelled(run.metrics[name]), between
    for name, title in (
        ("kl", "kl to the reference, nats a step"),
        ("entropy", "entropy, nats a step"),
        ("completions/mean_length", "mean length, steps"),
        ("clip_ratio/region_mean", "clipped steps, share"),
    ):
        if math.isfinite(run.end(name)):
            yield title, spelled(run.end(name)), _change(run, name)
    if parts := mean_seconds(run.records):
        total = sum(parts.values())
        most = sorted(parts.items(), key=lambda item: -item[1])[:2]
        words = ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in most)
        yield "seconds a step", spelled(total), words
    rate, steps = (run.end(f"time/{unit}_per_second") for unit in ("rollouts", "steps"))
    if math.isfinite(rate):
        yield "rollouts a second", spelled(rate), f"{spelled(steps)} steps a second"


def _change(run: RunFolder, name: str) -> str:
    start, end = run.start(name), run.end(name)
    if not math.isfinite(start):
        return ""
    return "as at the start" if start == end else f"{spelled(start)} at the start ({end - start:+.2g})"


# ---- rewards


def rewards_of(config: Mapping[str, Any]) -> list[tuple[str, float]]:
    """List the rewards of a plain configuration by the names that metrics use, with their weights."""
    listed = []
    for piece in config.get("rewards") or ():
        options = piece if isinstance(piece, Mapping) else {}
        name = options.get("label") or _name_of(piece).split(":")[-1].split(".")[-1]
        listed.append((name, float(options.get("weight", 1.0))))
    return listed


def _rewards(run: RunFolder) -> Markup:
    """Show of every reward its weight, its course, and its share of the advantage."""
    keys = {name.split("/")[1] for record in run.records for name in record if name.startswith("rewards/")}
    weights = dict(rewards_of(run.config))
    rows = []
    for name in sorted(keys, key=lambda name: (-abs(weights.get(name, 0.0)), name)):
        key = f"rewards/{name}"
        share = run.end(f"{key}/advantage_share")
        means = (run.start(f"{key}/mean"), run.end(f"{key}/mean"), run.end(f"{key}/group_std"))
        weight = f"{weights[name]:g}" if name in weights else ""
        rows.append(
            [name, weight, *map(spelled, means), f"{round(100 * share)} %" if math.isfinite(share) else "–"]
        )
    if not rows:
        return Markup()
    heads = [
        "",
        "weight",
        "mean, first",
        "mean, last",
        "spread in groups, last",
        "share of the advantage, last",
    ]
    return table(heads, rows) + macros().note(
        "Means over the first and the last tenth of the steps. Spread: standard deviation among the answers "
        "to one prompt, which is what a group can learn from. Share: how much of the advantage's variance "
        "inside groups comes from the reward with its weight; all shares add up to 1, and one below 0 pulls "
        "against the rest."
    )
