"""Files in a run's folder that its pages show: journal, last evaluation, warnings, configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.loading import read
from mmrl.config.schema import ConfigError
from mmrl.reporting.answers import NUMBER, TEXT, check_type
from mmrl.reporting.metrics import EVALUATION, VISUALIZATIONS, Journal, of_training
from mmrl.runtime.folders import mark_of

LISTS = {"rewards", "advantage", "metrics", "rollout.engine"}  # always flattened to `key[i]`


@dataclass(frozen=True)
class RunFolder:
    """Data read from the output folder of a run."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    config_text: str  # text of config.yaml
    records: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl, one per reported step
    metrics: Mapping[str, float]  # metrics of the last evaluation
    intervals: Mapping[str, Sequence[float]]
    warnings: Sequence[str]
    visualizations: str  # HTML fragments, inserted without escaping
    startup_warnings: Sequence[str] = ()  # warnings of the checks at the first step
    made: Mapping[str, Any] = field(default_factory=dict)  # the run's record: packages, code, machine

    @property
    def done(self) -> int:
        """Number of training steps that the run has taken."""
        trained = of_training(self.records)
        return trained[-1]["step"] + 1 if trained else 0

    @property
    def updates(self) -> int | None:
        """Number of weight updates so far; None if the journal does not record it."""
        counts = [int(record["updates"]) for record in self.records if "updates" in record]
        return counts[-1] if counts else None

    @property
    def reported(self) -> int:
        """Number of training steps that the journal reports."""
        return len(of_training(self.records))

    @property
    def seconds(self) -> float:
        """Total seconds of the reported steps."""
        return sum(record.get("step_time", 0.0) for record in self.records)

    @property
    def joules(self) -> dict[str, float]:
        """Total joules of the reported steps by kind of device; empty if the machine measures none."""
        totals: dict[str, float] = {}
        for record in self.records:
            for name in (name for name in record if name.startswith("energy/")):
                kind = name.removeprefix("energy/").removesuffix("_joules")
                totals[kind] = totals.get(kind, 0.0) + record[name]
        return totals

    def ends(self, name: str) -> tuple[float, float]:
        """Return a metric's mean over the first tenth of its finite values, and over the last tenth."""
        values = [value for record in self.records if math.isfinite(value := record.get(name, math.nan))]
        if not values:
            return math.nan, math.nan
        tenth = max(1, len(values) // 10)
        return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def read_run(folder: Path) -> RunFolder:
    """Read the output folder of a run; files can be missing.

    Raises ConfigError if a value in a file has the wrong type.
    """
    journal, warnings = Journal(folder), Journal(folder, "warnings.jsonl")
    records, raised = journal.read(), warnings.read()
    for number, record in enumerate(records, 1):
        for name, value in record.items():
            check_type(name, value, f"{journal.path}:{number}", NUMBER)
    for number, warning in enumerate(raised, 1):
        check_type("text", warning.get("text"), f"{warnings.path}:{number}", TEXT)
    metrics, intervals = read_evaluation(folder, records)
    config, visualizations = folder / "config.yaml", folder / VISUALIZATIONS
    return RunFolder(
        name=folder.resolve().name,
        folder=folder,
        config=read(config) if config.exists() else {},
        config_text=config.read_text() if config.exists() else "",
        records=records,
        metrics=metrics,
        intervals=intervals,
        warnings=[warning["text"] for warning in raised if warning.get("by") != "doctor"],
        visualizations=visualizations.read_text() if visualizations.exists() else "",
        made=mark_of(folder),
        startup_warnings=[warning["text"] for warning in raised if warning.get("by") == "doctor"],
    )


def find_run(folder: Path) -> RunFolder:
    """Read the folder of a run; raise ConfigError if it has no finished step."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder '{folder}'; name the output_dir of a training run")
    if not (folder / "metrics.jsonl").exists():
        inside = ", ".join(sorted(path.parent.name for path in folder.glob("*/metrics.jsonl")))
        hint = f"; it holds the runs {inside}" if inside else ""
        raise ConfigError(
            f"'{folder}' is not the output_dir of a training run: it has no metrics.jsonl{hint}"
        )
    run = read_run(folder)
    if not run.records:
        raise ConfigError(
            f"'{folder}' has no finished step in its metrics.jsonl, so there is nothing to show"
        )
    return run


def read_evaluation(folder: Path, records: Sequence[Mapping[str, Any]]) -> tuple[dict, dict]:
    """Return metrics and intervals of the last evaluation, from `evaluation.json` or else the journal."""
    path = folder / EVALUATION
    if path.exists():
        try:
            written = json.loads(path.read_text())
            for name, value in written["metrics"].items():
                for number in (value, *written["intervals"].get(name, ())):
                    check_type(name, number, str(path), NUMBER)
            return written["metrics"], written["intervals"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read '{path}': {error}") from error
    evaluations = (
        {n[5:]: v for n, v in record.items() if n.startswith("eval_")} for record in reversed(records)
    )
    last = next(filter(None, evaluations), {})
    metrics = {name: value for name, value in last.items() if not name.endswith(("/low", "/high"))}
    intervals = {n: (last[f"{n}/low"], last[f"{n}/high"]) for n in metrics if f"{n}/low" in last}
    return metrics, intervals


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys; a piece without options becomes its name."""
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
