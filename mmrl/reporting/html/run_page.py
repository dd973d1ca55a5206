"""The page of one run: the essential first, then every curve, pictures, samples, and the configuration."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.reporting.html.charts import spelled
from mmrl.reporting.html.curves import curves, frontier, mean_seconds, time_split
from mmrl.reporting.html.parts import (
    change,
    document,
    duration,
    figures_table,
    folded,
    grid,
    section,
    table,
    tile,
)
from mmrl.reporting.html.reading import Found, read_run
from mmrl.reporting.html.samples import read_samples, samples_section
from mmrl.reporting.rollout_mismatch import gap_table

TILES = 4  # held-out metrics among the numbers on top
PLAIN = ("completions/", "seconds_per_prompt", "peak_memory_bytes")  # held-out numbers that are no quality


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write `report.html` from what a run left in its folder: journal, last evaluation, warnings, exhibits,
    completions."""
    page = run_page(read_run(folder))
    path = output or folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def run_page(found: Found) -> str:
    """Lay out the page of a run."""
    runs = {found.name: found.records}
    samples = read_samples(found.folder, {name: weight for name, weight in rewards_of(found.config)})
    held_out = figures_table({"value": (found.metrics, found.intervals)}) if found.metrics else ""
    sections = {
        "held-out": section("Held out", held_out, name="held-out"),
        "rewards": section("Rewards", _rewards(found), name="rewards"),
        "curves": section(
            "Curves", grid([frontier(runs), time_split(found.records), *curves(runs)]), name="curves"
        ),
        "engine": section("Engine and policy", gap_table(found.records), name="engine"),
        "pictures": f"<div id=pictures>{found.visualizations}</div>" if found.visualizations else "",
        "samples": section("Samples", samples_section(samples), name="samples"),
        "configuration": section("Configuration", _config(found.folder), name="configuration"),
    }
    links = "".join(f"<a href='#{name}'>{name}</a>" for name, inside in sections.items() if inside)
    head = f"<h1>{html.escape(found.name)}</h1>{_note(found)}<nav>{links}</nav>"
    top = [head, _alarms(found), _tiles(found), _doctor(found)]
    return document(found.name, [*top, *sections.values()])


# ---- on top


def _note(found: Found) -> str:
    config = found.config
    most = config.get("max_steps")
    words = [f"{found.done}{f' of {most}' if most else ''} steps taken, {len(found.records)} steps reported"]
    seconds = sum(record.get("step_time", 0.0) for record in found.records)
    if seconds:
        words.append(f"{duration(seconds)} in reported steps")
    for key, inside in (("policy", "policy"), ("objective", "objective")):
        if key in config:
            words.append(f"{inside} {_named(config[key])}")
    rollout = config.get("rollout") or {}
    if "num_prompts" in rollout and "num_generations" in rollout:
        words.append(f"{rollout['num_prompts']} prompts × {rollout['num_generations']} rollouts a step")
    words += [f"seed {config['seed']}"] if "seed" in config else []
    return f"<p class=note>{html.escape(' · '.join(words))}</p>"


def _named(piece: Any) -> str:
    match piece:
        case {"name": name}:
            return str(name)
    return str(piece)


def _alarms(found: Found) -> str:
    said = "".join(
        f"<li>{html.escape(one['text'])}</li>" for one in found.warnings if one.get("by") != "doctor"
    )
    return f"<section class=alarms role=alert><h2>Alarms</h2><ul>{said}</ul></section>" if said else ""


def _doctor(found: Found) -> str:
    """Tell what the doctor found in the first step; nothing where it did not look."""
    asked = (found.config.get("report") or {}).get("doctor") or []
    said = [one["text"] for one in found.warnings if one.get("by") == "doctor"]
    if said:
        listed = "".join(f"<li>{html.escape(text)}</li>" for text in said)
        return f"<section class='alarms doctor'><h2>The doctor, at step 1</h2><ul>{listed}</ul></section>"
    if not asked or not found.records:
        return ""
    names = ", ".join(_named(one) for one in asked)
    return f"<p class=note>The doctor looked at step 1 ({html.escape(names)}) and found nothing wrong.</p>"


def _tiles(found: Found) -> str:
    return f"<div class=tiles>{''.join(_tiled(found))}</div>" if found.records else ""


def _tiled(found: Found) -> Iterator[str]:
    yield tile(
        "reward, last tenth", spelled(found.end("reward")), change(found.start("reward"), found.end("reward"))
    )
    shown = [name for name in found.metrics if not name.startswith(PLAIN)][:TILES]
    for name in shown:
        low, high = found.intervals.get(name, (math.nan, math.nan))
        between = f"{spelled(low)} to {spelled(high)}" if math.isfinite(low) else ""
        yield tile(f"{name}, held out", spelled(found.metrics[name]), between)
    for name, title in (
        ("kl", "kl to the reference, nats a step"),
        ("entropy", "entropy, nats a step"),
        ("completions/mean_length", "mean length, steps"),
        ("clip_ratio/region_mean", "clipped steps, share"),
    ):
        if math.isfinite(found.end(name)):
            yield tile(title, spelled(found.end(name)), change(found.start(name), found.end(name)))
    if parts := mean_seconds(found.records):
        total = sum(parts.values())
        most = sorted(parts.items(), key=lambda item: -item[1])[:2]
        words = ", ".join(f"{name} {100 * value / total:.0f} %" for name, value in most)
        yield tile("seconds a step", spelled(total), words)
    rate = found.end("time/rollouts_per_second")
    if math.isfinite(rate):
        steps = spelled(found.end("time/steps_per_second"))
        yield tile("rollouts a second", spelled(rate), f"{steps} steps a second")


# ---- below


def rewards_of(config: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Name the rewards of a plain configuration as metrics do, with their weights."""
    listed = []
    for piece in config.get("rewards") or ():
        options = piece if isinstance(piece, Mapping) else {}
        name = options.get("label") or _named(piece).split(":")[-1].split(".")[-1]
        listed.append((name, float(options.get("weight", 1.0))))
    return listed


def _rewards(found: Found) -> str:
    """Tell of every reward what it weighs, how it went, and how much of the advantage is its."""
    names = sorted(
        {name.split("/")[1] for record in found.records for name in record if name.startswith("rewards/")}
    )
    weights = dict(rewards_of(found.config))
    rows = []
    for name in sorted(names, key=lambda name: -abs(weights.get(name, 0.0))):
        key = f"rewards/{name}"
        share = found.end(f"{key}/share")
        rows.append(
            [
                html.escape(name),
                f"{weights[name]:g}" if name in weights else "",
                spelled(found.start(f"{key}/mean")),
                spelled(found.end(f"{key}/mean")),
                spelled(found.end(f"{key}/group_std")),
                f"{round(100 * share)} %" if math.isfinite(share) else "–",
            ]
        )
    if not rows:
        return ""
    note = (
        "<p class=note>Means over the first and the last tenth of the steps. Spread: standard deviation "
        "among the answers to one prompt, which is what a group can learn from. Share: how much of the "
        "advantage's variance inside groups comes from the reward with its weight; all shares add up to 1, "
        "and one below 0 pulls against the rest.</p>"
    )
    heads = [
        "",
        "weight",
        "mean, first",
        "mean, last",
        "spread in groups, last",
        "share of the advantage, last",
    ]
    return table(heads, rows) + note


def _config(folder: Path) -> str:
    path = folder / "config.yaml"
    if not path.exists():
        return ""
    return folded("config.yaml, with all defaults", f"<pre>{html.escape(path.read_text())}</pre>")
