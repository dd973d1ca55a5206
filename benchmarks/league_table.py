"""The league table: differences to GRPO with intervals, as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.league_tasks import BASE
from benchmarks.reg_grpo import paired


def summarise(runs: Sequence[Mapping[str, Any]], start: Mapping[str, float]) -> dict[str, Any]:
    """Make a row per method, best difference first; each is compared on the seeds that both finished."""
    of: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        of.setdefault(run["method"], {})[run["seed"]] = run
    uids = list(start)

    def scores(name: str, seeds: Sequence[int]) -> Tensor:
        values = [[of[name][seed]["scores"][uid] for uid in uids] for seed in seeds]
        return torch.tensor(values, dtype=torch.float64)  # (S, Q)

    rows = []
    for name, done in of.items():
        seeds = sorted(set(done) & set(of.get(BASE, {})))
        if not seeds:
            continue
        some = [done[seed] for seed in seeds]
        row: dict[str, Any] = {
            "method": name,
            "seeds": len(seeds),
            "reward": round(float(scores(name, seeds).mean()), 4),
        }
        row["difference"] = {"mean": 0.0, "interval": [0.0, 0.0], "by_seed": [0.0] * len(seeds)}
        if name != BASE:
            row["difference"] = paired(scores(name, seeds) - scores(BASE, seeds), uids)
            low, high = row["difference"]["interval"]
            row["within_noise"] = low <= 0 <= high
        row |= {key: round(mean(run[key] for run in some), 4) for key in ("rollouts", "updates", "seconds")}
        row["groups_with_gradient"] = round(mean(run["groups_with_gradient"] for run in some), 4)
        rows.append(row)
    rows.sort(key=lambda row: -row["difference"]["mean"])
    return {"start": round(mean(start.values()), 4), "rows": rows}


def verdict(row: Mapping[str, Any]) -> str:
    """Say in words how a method compares with GRPO."""
    if "within_noise" not in row:
        return ""
    if row["within_noise"]:
        return "within noise"
    return "better" if row["difference"]["mean"] > 0 else "worse"


def markdown(found: Mapping[str, Any]) -> str:
    """Write the table, and below it what it cannot say and who is missing."""
    rows = found["rows"]
    lines = [
        f"| method | seeds | reward (start {found['start']:.3f}) | less {BASE} | by seed | "
        "| rollouts | updates | groups with gradient | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        gap, cells = row["difference"], ["", ""]
        if "within_noise" in row:
            low, high = gap["interval"]
            seeds = ", ".join(f"{value:+.3f}" for value in gap["by_seed"])
            cells = [f"{gap['mean']:+.3f} ({low:+.3f} to {high:+.3f})", seeds]
        cells = [row["method"], f"{row['seeds']}", f"{row['reward']:.3f}", *cells, verdict(row)]
        counts = [f"{row['rollouts']:.0f}", f"{row['updates']:.0f}", f"{row['groups_with_gradient']:.0%}"]
        lines.append(f"| {' | '.join([*cells, *counts, format(row['seconds'], '.1f')])} |")
    compared = [row for row in rows if "within_noise" in row]
    noisy = sum(row["within_noise"] for row in compared)
    lines += [
        "",
        f"{noisy} of {len(compared)} are within noise. Of as many methods that were equal to {BASE}, about "
        f"{len(compared) / 20:.0f} would stand outside of their intervals by chance.",
        "",
        *(f"- not compared: `{name}`: {why}" for name, why in sorted(found["skipped"].items())),
    ]
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw differences with their intervals, sorted; grey ones are within noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in reversed(found["rows"]) if "within_noise" in row]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.17 * len(rows)))
    for i, row in enumerate(rows):
        colour = {"within noise": "grey", "better": "C0", "worse": "C3"}[verdict(row)]
        axes.plot(row["difference"]["interval"], [i, i], color=colour, lw=1.5)
        axes.plot([row["difference"]["mean"]], [i], "o", color=colour, ms=4)
    axes.set_yticks(range(len(rows)), [f"{row['method']} ({row['seeds']})" for row in rows], fontsize=7)
    axes.axvline(0, color="black", lw=0.8, ls=":")
    axes.set_ylim(-1, len(rows))
    axes.set_xlabel(f"held-out reward less that of {BASE}, 95 % interval (in brackets: seeds)")
    axes.set_title(f"{found['task']}: grey is within noise", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
