"""The league table: differences to GRPO with intervals, as Markdown and as a plot.

    python -m benchmarks.league_table benchmarks/results/league_text.json ...

The command writes the table and the plot of stored results anew; nothing is trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.league_tasks import AGAIN, BASE, CONTROLS, updates_of
from benchmarks.reg_grpo import paired

COLUMNS = (
    "method",
    "seeds",
    "reward",
    f"less {BASE}",
    "by seed",
    "",
    f"less {BASE} with as many updates",
    "",
)
COUNTS = ("rollouts", "updates", "groups with gradient", "seconds")


def summarise(runs: Sequence[Mapping[str, Any]], start: Mapping[str, float]) -> dict[str, Any]:
    """Make a row per method, best difference first; two are compared on the seeds that both finished.

    `noise` is the far end of the interval in which GRPO differs from itself with other seeds.
    """
    of: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        of.setdefault(run["method"], {})[run["seed"]] = run
    again = compared(of, AGAIN, BASE, list(start))
    noise = max(map(abs, again["interval"])) if again else 0.0
    matched = {updates_of(name): name for name in (*CONTROLS, BASE)}  # the last of a number is GRPO itself
    rows = []
    for name, done in of.items():
        control = matched.get(updates_of(name), BASE)
        gaps = {"less_base": compared(of, name, BASE, list(start))}
        if control not in (BASE, name):
            gaps["less_control"] = compared(of, name, control, list(start))
        row = {"method": name, "seeds": len(done), "reward": mean(map(reward_of, done.values()))}
        for key, gap in gaps.items():
            if gap and name != BASE:
                row[key] = {**gap, "verdict": verdict(gap, 0.0 if name == AGAIN else noise)}
        for key in ("rollouts", "updates", "groups_with_gradient", "seconds"):
            row[key] = round(mean(run[key] for run in done.values()), 4)
        rows.append({**row, "reward": round(row["reward"], 4)})
    rows.sort(key=lambda row: -row["less_base"]["mean"] if "less_base" in row else 0.0)
    rows, same = distinct(rows)
    return {"start": round(mean(start.values()), 4), "noise": noise, "rows": rows, "same": same}


def distinct(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, list[str]]]:
    """Keep the first of the rows that have the same scores in all seeds; return those that left, by it.

    Two rows have the same scores where reward, difference to GRPO, its interval and that of every seed are
    equal to the last digit. GRPO and its controls always stay.
    """
    kept: dict[Any, Mapping[str, Any]] = {}
    same: dict[str, list[str]] = {}
    first = {name: at for at, name in enumerate((BASE, *CONTROLS))}
    for row in sorted(rows, key=lambda row: first.get(row["method"], len(first))):
        gap = row.get("less_base", {"mean": 0.0, "interval": [0, 0], "by_seed": [0] * row["seeds"]})
        key = (row["seeds"], row["reward"], gap["mean"], tuple(gap["interval"]), tuple(gap["by_seed"]))
        if kept.setdefault(key, row) is not row and row["method"] not in first:
            same.setdefault(kept[key]["method"], []).append(row["method"])
    left = {name for others in same.values() for name in others}
    return [row for row in rows if row["method"] not in left], same


def reward_of(run: Mapping[str, Any]) -> float:
    """Average the held-out reward of a run."""
    return mean(run["scores"].values())


def compared(
    of: Mapping[str, Mapping[int, Mapping[str, Any]]], name: str, other: str, uids: Sequence[str]
) -> dict[str, Any]:
    """Compare two methods on the seeds that both finished; empty where there is none."""
    seeds = sorted(set(of.get(name, {})) & set(of.get(other, {})))

    def scores(method: str) -> Tensor:
        rows = [[of[method][seed]["scores"][uid] for uid in uids] for seed in seeds]
        return torch.tensor(rows, dtype=torch.float64)  # (S, Q)

    return paired(scores(name) - scores(other), uids) if seeds else {}


def verdict(gap: Mapping[str, Any], noise: float) -> str:
    """Say in words whether a difference is more than noise; one seed says nothing about other seeds."""
    low, high = gap["interval"]
    if len(gap["by_seed"]) == 1:
        return "one seed"
    if low <= 0 <= high or abs(gap["mean"]) <= noise:
        return "within noise"
    return "better" if low > 0 else "worse"


def markdown(found: Mapping[str, Any]) -> str:
    """Write the table, what its words mean, and who is missing."""
    rows, names = found["rows"], [*COLUMNS, *COUNTS]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for row in rows:
        gaps = [cells for key in ("less_base", "less_control") for cells in written(row.get(key))]
        gaps.pop(4)  # the seeds of the second difference
        cells = [row["method"], str(row["seeds"]), f"{row['reward']:.3f}", *gaps]
        cells += [f"{row['rollouts']:.0f}", f"{row['updates']:.0f}", f"{row['groups_with_gradient']:.0%}"]
        lines.append(f"| {' | '.join(cells)} | {row['seconds']:.1f} |")
    others = [row for row in rows if "less_base" in row and row["method"] != AGAIN]
    judged = [row["less_base"]["verdict"] for row in others if row["seeds"] > 1]
    noisy = f"{judged.count('within noise')} of {len(judged)} are"
    count = noisy if judged else "a single seed decides about none"
    lines += [
        "",
        f"The reward before is {found['start']:.3f}. A difference is within noise where its interval "
        f"holds 0, or where it is at most {found['noise']:.3f}, the far end of the interval in which {BASE} "
        f"differs from itself with other seeds; {count}.",
        "",
        *(
            f"- not in the table, because all scores of all seeds are those of `{name}` (here with "
            f"{updates_of(name)} {'update' if updates_of(name) == 1 else 'updates'} a collection): "
            + ", ".join(f"`{other}`" for other in sorted(others))
            for name, others in sorted(found.get("same", {}).items())
        ),
        *(f"- not compared: `{name}`: {why}" for name, why in sorted(found["skipped"].items())),
    ]
    return "\n".join(lines) + "\n"


def written(gap: Mapping[str, Any] | None) -> list[str]:
    """Write a difference with its interval, that of every seed, and the verdict."""
    if not gap:
        return ["", "", ""]
    low, high = gap["interval"]
    seeds = ", ".join(f"{value:+.3f}" for value in gap["by_seed"])
    return [f"{gap['mean']:+.3f} ({low:+.3f} to {high:+.3f})", seeds, gap["verdict"]]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw differences with their intervals, sorted; hollow ones are to GRPO with as many updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in reversed(found["rows"]) if "less_base" in row]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.19 * len(rows)))
    axes.axvspan(-found["noise"], found["noise"], color="0.93", zorder=0)
    colours = {"better": "C0", "worse": "C3"}
    for i, row in enumerate(rows):
        for key, at, fill in (("less_base", i, True), ("less_control", i - 0.35, False)):
            if gap := row.get(key):
                colour = colours.get(gap["verdict"], "0.5")
                axes.plot(gap["interval"], [at, at], color=colour, lw=1.2)
                axes.plot([gap["mean"]], [at], "o", color=colour, ms=3.5, mfc=colour if fill else "white")
    axes.set_yticks(range(len(rows)), [f"{row['method']} ({row['seeds']})" for row in rows], fontsize=7)
    axes.axvline(0, color="black", lw=0.8, ls=":")
    axes.set_ylim(-1, len(rows))
    axes.set_xlabel(f"held-out reward less that of {BASE} (hollow: with as many updates), 95 % interval")
    axes.set_title(f"{found['task']}: in brackets seeds; grey is within noise", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(files: Sequence[str]) -> int:
    """Take rows that are equal out of stored results, and write them, their tables and their plots."""
    for path in map(Path, files):
        found = json.loads(path.read_text())
        found["rows"], same = distinct(found["rows"])
        found["same"] = {**found.get("same", {}), **same}
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(found))
        draw(found, path.with_suffix(".svg"))
        print(f"{path}: {len(found['rows'])} rows, {sum(map(len, found['same'].values()))} equal others")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
