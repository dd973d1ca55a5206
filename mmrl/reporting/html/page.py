"""Pages from jinja2 templates: one self-contained HTML document, and the tables inside it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mmrl.config.loading import read
from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import Measured
from mmrl.reporting.metrics import EVALUATION, VISUALIZATIONS, Journal

HERE = Path(__file__).parent
Section = tuple[str, str, Markup]  # anchor, title, content


@cache
def templates() -> Environment:
    """Load the templates of this folder. Everything is escaped but what is Markup already."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


@cache
def macros() -> Any:
    """Return the macros of `parts.j2` (tables, tiles, figures, charts); each gives Markup."""
    return templates().get_template("parts.j2").module


def document(
    title: str,
    fragments: Sequence[str] = (),
    sections: Sequence[Section] = (),
    *,
    heading: str = "",
    subtitle: Markup | str = "",
) -> str:
    """Build a page that loads nothing from elsewhere: for a run, an evaluation or a comparison.

    Args:
        title: Title of the browser's window.
        fragments: HTML to lay out first, one below the other.
        sections: Parts with a heading and a link to each; those without content are left out.
        heading: Text of the first heading, or nothing where a fragment has it.
        subtitle: Line below the heading.
    """
    style, script = ((HERE / name).read_text() for name in ("style.css", "script.js"))
    return (
        templates()
        .get_template("page.j2")
        .render(
            title=title,
            heading=heading,
            subtitle=subtitle,
            fragments=[Markup(fragment) for fragment in fragments],
            sections=[section for section in sections if section[2]],
            style=Markup(style),
            script=Markup(script),
            # Text from files is escaped; a script that gets in by a visualization does not run.
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> Markup:
    """Lay out rows whose first cell is their name; `kind` is a CSS class of the other cells."""
    return macros().table(heads, rows, kind) if rows else Markup()


def metric_table(columns: Mapping[str, Measured]) -> Markup:
    """Show evaluations side by side, one row a metric, with their intervals."""
    return figures_table({title: (found.metrics, found.intervals) for title, found in columns.items()})


def figures_table(
    columns: Mapping[str, tuple[Mapping[str, float], Mapping[str, Sequence[float]]]],
    heads: Sequence[str] = (),
) -> Markup:
    """Show (metrics, intervals) side by side; `heads` replace the columns' names."""
    names = dict.fromkeys(name for metrics, _ in columns.values() for name in metrics)
    rows = [[_breakable(name), *(_with_interval(*pair, name) for pair in columns.values())] for name in names]
    return table(heads or ["", *columns], rows)


def _with_interval(metrics: Mapping[str, float], intervals: Mapping[str, Sequence[float]], name: str) -> str:
    if name not in metrics:
        return ""
    value, (low, high) = metrics[name], intervals.get(name, (math.nan, math.nan))
    number = f"{value:.3f}" if abs(value) < 1e4 else f"{value:,.0f}"
    return (
        Markup("{} <small>{:.3f} – {:.3f}</small>").format(number, low, high)
        if math.isfinite(low)
        else number
    )


def _breakable(name: str) -> Markup:
    """Let a browser break the name of a metric after `/` and `_`."""
    return escape(name).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>"))


def duration(seconds: float) -> str:
    """Write a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- reading of a run's folder for its page: journal, last evaluation, warnings, configuration


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote into its folder. `metrics` and `intervals` are those of its last evaluation."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    config_text: str
    records: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]
    warnings: Sequence[Mapping[str, Any]]
    visualizations: str

    @property
    def done(self) -> int:
        """Count the steps that were taken."""
        return self.records[-1]["step"] + 1 if self.records else 0

    @property
    def seconds(self) -> float:
        """Add up the seconds of all reported steps."""
        return sum(record.get("step_time", 0.0) for record in self.records)

    def start(self, name: str) -> float:
        """Average a metric over the first tenth of the records that have it, or over the first; else nan."""
        values = self._values(name)
        return _mean(values[: max(1, len(values) // 10)])

    def end(self, name: str) -> float:
        """Average a metric over the last tenth of the records that have it, or over the last; else nan."""
        values = self._values(name)
        return _mean(values[-max(1, len(values) // 10) :])

    def _values(self, name: str) -> list[float]:
        values = [record.get(name, math.nan) for record in self.records]
        return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def read_run(folder: Path) -> RunFolder:
    """Read what a run wrote so far; any of its files may be missing.

    Raises:
        ConfigError: A file has something else where a run writes a number or a text.
    """
    records, warnings = Journal(folder).read(), Journal(folder, "warnings.jsonl").read()
    for number, record in enumerate(records, 1):
        for name, value in {"step": None, **record}.items():
            check_number(value, f"{folder / 'metrics.jsonl'}:{number}", name)
    for number, warning in enumerate(warnings, 1):
        if not isinstance(text := warning.get("text"), str):
            raise ConfigError(f"{folder / 'warnings.jsonl'}:{number}: 'text' must be a text, not {text!r}")
    metrics, intervals = _evaluation(folder, records)
    config, visualizations = folder / "config.yaml", folder / VISUALIZATIONS
    return RunFolder(
        name=folder.resolve().name,
        folder=folder,
        config=read(config) if config.exists() else {},
        config_text=config.read_text() if config.exists() else "",
        records=records,
        metrics=metrics,
        intervals=intervals,
        warnings=warnings,
        visualizations=visualizations.read_text() if visualizations.exists() else "",
    )


def check_number(value: Any, place: str, name: str) -> None:
    """Raise unless a value is a number, as a run writes it; `place` and `name` go into the error."""
    if not isinstance(value, int | float):
        raise ConfigError(f"{place}: '{name}' must be a number, not {str(value)[:80]!r}")


def find_run(folder: Path) -> RunFolder:
    """Read the run in a folder that a user named; raise ConfigError where there is none."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder '{folder}'; name the output_dir of a training run")
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if not (folder / "metrics.jsonl").exists():
        hint = f"; it holds the runs {', '.join(inside)}" if inside else ""
        raise ConfigError(
            f"'{folder}' is not the output_dir of a training run: it has no metrics.jsonl{hint}"
        )
    run = read_run(folder)
    if not run.records:
        raise ConfigError(
            f"'{folder}' has no finished step in its metrics.jsonl, so there is nothing to show"
        )
    return run


def _evaluation(folder: Path, records: Sequence[Mapping[str, Any]]) -> tuple[dict, dict]:
    """Read metrics and intervals of the last evaluation: from its own file, or else from the journal."""
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
