"""Groups of runs that differ only in their seed: merged metrics, and paired differences of evaluations."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmrl.config.changes import UNTOLD
from mmrl.config.loading import nearest
from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import EQUAL
from mmrl.reporting.answers import PREDICTIONS
from mmrl.reporting.html.charts import finite, mean
from mmrl.reporting.html.layout import spelled
from mmrl.reporting.html.run_folder import RunFolder, flattened
from mmrl.reporting.intervals import paired_interval
from mmrl.reporting.metrics import steps_taken
from mmrl.reporting.predictions import (
    Predictions,
    Row,
    aligned,
    by_prompt,
    find_predictions,
    read_predictions,
    value_of,
)

BOUNDS = ("/low", "/high")


@dataclass(frozen=True)
class RunGroup:
    """Several runs with equal settings except the seed; metrics are means over the runs."""

    name: str
    runs: Sequence[RunFolder]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of the first run, with the seeds of all."""
        shared = {key: value for key, value in self.runs[0].config.items() if key not in UNTOLD}
        return {**shared, "seed": ", ".join(str(run.config.get("seed", "not set")) for run in self.runs)}

    @property
    def config_text(self) -> str:
        """The configuration file of the first run."""
        return self.runs[0].config_text

    @property
    def done(self) -> int:
        """Number of steps of the longest run."""
        return max(run.done for run in self.runs)

    @property
    def seconds(self) -> float:
        """Total seconds of all runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def warnings(self) -> list[str]:
        """The distinct warnings of all runs."""
        return list(dict.fromkeys(text for run in self.runs for text in run.warnings))

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """One record per step: each metric's mean, lowest and highest value over runs."""
        steps: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
        for run in self.runs:
            for record in run.records:
                steps.setdefault((record["step"], steps_taken(record)), []).append(record)
        return [_merged(step, records) for (step, _), records in sorted(steps.items())]

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Mean of every metric of the last evaluation over the runs that have it."""
        return {name: mean(values) for name, values in self._measured.items()}

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value over the runs of every metric of the last evaluation."""
        values = {name: finite(values) for name, values in self._measured.items()}
        return {name: (min(some), max(some)) for name, some in values.items() if len(some) > 1}

    @cached_property
    def _measured(self) -> dict[str, list[float]]:
        names = dict.fromkeys(name for run in self.runs for name in run.metrics)
        return {name: [run.metrics[name] for run in self.runs if name in run.metrics] for name in names}

    def ends(self, name: str) -> tuple[float, float]:
        """Average a metric's `RunFolder.ends` (start, end of training) over the runs; NaN without values."""
        first, last = zip(*(run.ends(name) for run in self.runs), strict=True)
        return mean(first), mean(last)


Column = RunFolder | RunGroup


def _merged(step: int, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the records of several runs at one step; bounds are the lowest and the highest value."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    merged: dict[str, Any] = {"step": step}
    for name in names:
        if name.endswith(BOUNDS) and name.rpartition("/")[0] in names:
            continue  # bounds within one run: replaced by the range over runs
        values = finite([record[name] for record in records if name in record])
        merged[name] = mean(values)
        merged |= {f"{name}/low": min(values), f"{name}/high": max(values)} if values else {}
    return merged


def group_runs(runs: Mapping[str, RunFolder], by: Sequence[str] = ()) -> dict[str, Column]:
    """Group runs by equal settings, and return the groups and the single runs by name.

    Args:
        runs: The runs by name.
        by: Dotted keys; runs with equal values of these keys form a group. Empty: runs with equal settings
            except the seed form a group.

    Raises:
        ConfigError: No run has one of the keys.
    """
    settings = {name: flattened(run.config) for name, run in runs.items()}
    for key in by:
        known = {known for flat in settings.values() for known in flat}
        if key not in known:
            hint = nearest(key, known) or "`mmrl keys` lists them"
            raise ConfigError(f"no run has a setting '{key}' to group by; {hint}")
    members: dict[str, list[str]] = {}
    for name, flat in settings.items():
        kept = {key: flat.get(key) for key in by} if by else _without(flat, "seed", *UNTOLD)
        # Without a recorded configuration, a run joins no group.
        members.setdefault(repr(sorted(kept.items())) if flat else name, []).append(name)
    grouped: dict[str, Column] = {}
    for names in members.values():
        title = _title(names, settings[names[0]], by)
        title = f"{title} ({len(names)} runs)" if len(names) > 1 else title
        while title in grouped:
            title += "'"
        some = [runs[name] for name in names]
        grouped[title] = RunGroup(title, some) if len(some) > 1 else some[0]
    return grouped


def _without(flat: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key not in keys}


def _title(names: Sequence[str], flat: Mapping[str, Any], by: Sequence[str]) -> str:
    """Name a group by its keys, else by the common prefix of its runs' names."""
    if by:
        return ", ".join(f"{key.rpartition('.')[2]}={flat.get(key, 'not set')}" for key in by)
    if len(names) == 1:
        return names[0]
    shared = re.sub(r"(?i)[-_./ ]*(seed)?[-_=]*\d*$", "", os.path.commonprefix(list(names)))
    return shared or names[0]


def members_of(column: Column) -> Sequence[RunFolder]:
    """Return the runs of a group, or the run itself."""
    return column.runs if isinstance(column, RunGroup) else [column]


# ---- paired differences of the last evaluations


def paired_rows(columns: Mapping[str, Column]) -> tuple[list[list[str]], list[str]]:
    """Compare every group's last stored answers with the first group's, prompt by prompt.

    Prompts are the same if their uids are, or, where no uid is in both, their text, target and media.

    Returns:
        Rows of a table: measure, group, difference with a 95 % interval, prompts, and numbers of runs; and
            sentences about runs without stored answers.
    """
    answers, notes = {}, []
    for name, column in columns.items():
        answers[name] = [found for run in members_of(column) if (found := _answers(run, notes)) is not None]
    first, *others = columns
    rows = []
    for other in others:
        if not answers[first] or not answers[other]:
            continue
        named = [aligned(answers[first][0], some) for some in (*answers[first], *answers[other])]
        both = [by_prompt(some) for some in named]
        uids = [uid for uid in both[0] if all(_same_target(one, both[0], uid) for one in both)]
        measures = [name for name in _measures(both[0]) if all(name in _measures(one) for one in both)]
        for measure in measures:
            values = {uid: [value_of(one[uid], measure) for one in both] for uid in uids}
            used = [uid for uid in uids if all(map(math.isfinite, values[uid]))]
            table = [[values[uid][i] for uid in used] for i in range(len(both))]
            cut = len(answers[first])
            if not used:
                continue
            gap, low, high = paired_interval(table[:cut], table[cut:])
            text = f"{_signed(gap)} ({_signed(low)} to {_signed(high)})"
            sizes = f"{len(table) - cut} and {cut}"
            rows.append([measure.removeprefix("reward/"), other, text, str(len(used)), sizes])
        if not uids:
            notes.append(f"{other} and {first} answered no prompt in common")
    return rows, notes


def _answers(run: RunFolder, notes: list[str]) -> Predictions | None:
    """Read the answers of a run's last evaluation; append to `notes` if there are none."""
    if not (run.folder / PREDICTIONS).is_dir():
        notes.append(f"{run.name} stored no answers of an evaluation")
        return None
    return read_predictions(find_predictions(run.folder))


def _same_target(one: Mapping[str, Sequence[Row]], other: Mapping[str, Sequence[Row]], uid: str) -> bool:
    return uid in one and one[uid][0].get("target") == other[uid][0].get("target")


def _measures(answers: Mapping[str, Sequence[Row]]) -> list[str]:
    row = next(iter(answers.values()))[0]
    names = [name for name in row if name.startswith("reward/")]
    return names if len(names) == 1 else [*names, "reward"]


def _signed(value: float) -> str:
    return f"{'+' if value > EQUAL else ''}{spelled(value)}"


# ---- origin and cost


def cost_rows(runs: Mapping[str, RunFolder]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return column titles, a row per run (seed, commit, devices, steps, seconds, energy), and notes."""
    versions = {name: list(run.made.get("versions", ())) for name, run in runs.items()}
    shared = [
        text for text in next(iter(versions.values())) if all(text in some for some in versions.values())
    ]
    titles = ["run", "seed", "commit", "devices", "steps", "seconds", "joules", "other packages"]
    rows, unmetered = [], []
    for name, run in runs.items():
        machine = run.made.get("machine", {})
        joules = [f"{kind} {spelled(spent)}" for kind, spent in run.joules.items()]
        rows.append(
            [
                name,
                str(run.config.get("seed", "")),
                str(machine.get("commit", ""))[:12] or "not recorded",
                ", ".join(map(str, machine.get("devices", ()))) or "not recorded",
                str(run.done),
                spelled(run.seconds),
                ", ".join(joules) or "not measured",
                ", ".join(text for text in versions[name] if text not in shared),
            ]
        )
        unmetered += map(str, machine.get("unmetered", ()))
    notes = [f"packages of all runs: {', '.join(shared) or 'not recorded'}"]
    notes += [f"energy is not measured of {text}" for text in dict.fromkeys(unmetered)]
    return titles, rows, notes
