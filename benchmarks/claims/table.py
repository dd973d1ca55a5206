"""Print the results of all scripts of `benchmarks.claims` as one Markdown table, that of `docs/claims.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.claims.common import RESULTS

HEAD = ("method", "run", "measure", "mean", "by seed", "gain (95 % interval)", "claim")


def table(folder: Path = RESULTS) -> str:
    """Make the table of all `claims_*.json` of a folder."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for path in sorted(folder.glob("claims_*.json")):
        lines += cells(json.loads(path.read_text()))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Give the lines of a method; its name and verdict stand in the first."""
    lines = []
    for number, row in enumerate(found["rows"]):
        mean, low, high = row["gain"]
        gain = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" if any(row["gain"]) else ""
        seeds = ", ".join(f"{value:.3f}" for value in row["by_seed"])
        first = (found["method"], found["verdict"].partition(":")[0]) if number == 0 else ("", "")
        measure = row.get("measure", found["measure"])
        lines.append((first[0], row["name"], measure, f"{row['mean']:.3f}", seeds, gain, first[1]))
    return lines


if __name__ == "__main__":
    print(table())
