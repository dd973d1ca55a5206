"""The file that keeps every finished run of the league table, so that another machine can go on with it.

The first line says what all runs share: settings, and the held-out prompts with the answers that were right
before. Each other line is a run; of its answers, how many of each prompt were right, a digit a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ANSWERS = 4  # to a held-out prompt
Scores = Mapping[str, float]  # share of right answers of each prompt


class Finished:
    """Runs that are finished, by method and seed, in a file that grows by a line a run.

    Args:
        path: File of JSON lines; made where it is missing.
        settings: What the runs share.
        start: Scores of the model that they begin from. Runs of other settings or another start are refused
            with a SystemExit: their differences would not be those of methods.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], start: Scores) -> None:
        self.path, self.uids = path, sorted(start)
        shared = {**settings, "prompts": " ".join(self.uids), "right_before": self.digits(start)}
        if not path.exists():
            path.write_text(json.dumps(shared) + "\n")
        first, *runs = (json.loads(line) for line in path.read_text().splitlines())
        if first != shared:
            differ = ", ".join(key for key in {**first, **shared} if first.get(key) != shared.get(key))
            raise SystemExit(f"{path} has runs that differ in {differ}; remove it, or give another --results")
        self.runs = {(run["method"], run["seed"]): self.read(run) for run in runs}

    def add(self, run: Mapping[str, Any]) -> None:
        """Keep a run."""
        self.runs[run["method"], run["seed"]] = dict(run)
        rest = {key: value for key, value in run.items() if key != "scores"}
        with self.path.open("a") as file:
            file.write(json.dumps({**rest, "right": self.digits(run["scores"])}) + "\n")

    def read(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Write the scores of a run's line out."""
        rest = {key: value for key, value in line.items() if key != "right"}
        right = zip(self.uids, line["right"], strict=True)
        return {**rest, "scores": {uid: int(digit) / ANSWERS for uid, digit in right}}

    def digits(self, scores: Scores) -> str:
        """Count the right answers of every prompt."""
        return "".join(str(round(scores[uid] * ANSWERS)) for uid in self.uids)
