"""What a run left in its folder, as the pages show it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.loading import read
from mmrl.config.schema import ConfigError
from mmrl.reporting.metrics import EVALUATION, EXHIBITS, Journal


@dataclass(frozen=True)
class Found:
    """A run, read from its folder. `metrics` and `intervals` are those of its last evaluation."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]
    warnings: Sequence[Mapping[str, Any]]
    visualizations: str

    @property
    def done(self) -> int:
        """Count the steps that were taken."""
        return self.records[-1]["step"] + 1 if self.records else 0

    def start(self, name: str) -> float:
        """Average a metric over the first tenth of the records that have it, or over the first."""
        return self._mean(name, slice(None, self._tenth(name)))

    def end(self, name: str) -> float:
        """Average a metric over the last tenth of the records that have it, or over the last."""
        return self._mean(name, slice(-self._tenth(name), None))

    def _values(self, name: str) -> list[float]:
        values = [record.get(name, math.nan) for record in self.records]
        return [value for value in values if math.isfinite(value)]

    def _tenth(self, name: str) -> int:
        return max(1, len(self._values(name)) // 10)

    def _mean(self, name: str, part: slice) -> float:
        values = self._values(name)[part]
        return sum(values) / len(values) if values else math.nan


def read_run(folder: Path) -> Found:
    """Read what there is; a folder may lack everything."""
    records, warnings = Journal(folder).read(), Journal(folder, "warnings.jsonl").read()
    for number, record in enumerate(records, 1):
        for name, value in {"step": None, **record}.items():
            check_number(value, f"{folder / 'metrics.jsonl'}:{number}", name)
    for number, warning in enumerate(warnings, 1):
        if not isinstance(warning.get("text"), str):
            raise ConfigError(
                f"{folder / 'warnings.jsonl'}:{number}: 'text' must be a text, not {warning.get('text')!r}"
            )
    metrics, intervals = _measured(folder, records)
    config, visualizations = folder / "config.yaml", folder / EXHIBITS
    return Found(
        name=folder.resolve().name,
        folder=folder,
        config=read(config) if config.exists() else {},
        records=records,
        metrics=metrics,
        intervals=intervals,
        warnings=warnings,
        visualizations=visualizations.read_text() if visualizations.exists() else "",
    )


def check_number(value: Any, place: str, name: str) -> None:
    """Refuse what is no number where a run writes one."""
    if not isinstance(value, int | float):
        raise ConfigError(f"{place}: '{name}' must be a number, not {str(value)[:80]!r}")


def find_run(folder: Path) -> Found:
    """Read a run that is asked for by name, or say what is wrong with the folder."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder '{folder}'; name the output_dir of a training run")
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if not (folder / "metrics.jsonl").exists():
        hint = f"; it holds the runs {', '.join(inside)}" if inside else ""
        raise ConfigError(
            f"'{folder}' is not the output_dir of a training run: it has no metrics.jsonl{hint}"
        )
    found = read_run(folder)
    if not found.records:
        raise ConfigError(
            f"'{folder}' has no finished step in its metrics.jsonl, so there is nothing to show"
        )
    return found


def _measured(folder: Path, records: Sequence[Mapping[str, Any]]) -> tuple[dict, dict]:
    """Read the last evaluation: of its own file, or else of the journal."""
    path = folder / EVALUATION
    if path.exists():
        try:
            written = json.loads(path.read_text())
            for name, value in written["metrics"].items():
                for number in (value, *written["intervals"].get(name, ())):
                    check_number(number, str(path), name)
            return written["metrics"], written["intervals"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read '{path}': {error}") from error
    held_out = [{n: v for n, v in record.items() if n.startswith("eval_")} for record in records]
    last = next((record for record in reversed(held_out) if record), {})
    metrics = {name[5:]: v for name, v in last.items() if not name.endswith(("/low", "/high"))}
    intervals = {
        name: (last[f"eval_{name}/low"], last[f"eval_{name}/high"])
        for name in metrics
        if f"eval_{name}/low" in last
    }
    return metrics, intervals
