"""Charts of a run's metrics: which metrics share a chart, and its title and unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from markupsafe import Markup

from mmrl.core.reward_table import EQUAL
from mmrl.reporting.html.charts import Line, area_chart, frontier_chart, line_chart, spelled
from mmrl.reporting.html.page import macros

Records = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Records]


@dataclass(frozen=True)
class Panel:
    """A chart of the metrics whose names match one of `patterns` and none of `but` (shell wildcards)."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    but: tuple[str, ...] = ("*/low", "*/high")  # ends of intervals

    def label(self, name: str) -> str:
        """Name a line by the part of its metric's name that the pattern leaves open."""
        before, star, after = self.patterns[0].partition("*")
        return name.removeprefix(before).removesuffix(after) if star and len(self.patterns) == 1 else name


PANELS = (
    Panel("reward", "weighted sum of the rewards", ("reward", "eval_reward")),
    Panel("rewards by name", "mean, each in its own unit", ("rewards/*/mean",)),
    Panel("share of the advantage", "share of each reward; 1 in all", ("rewards/*/advantage_share",)),
    Panel("spread inside groups", "standard deviation among answers to one prompt", ("rewards/*/group_std",)),
    Panel("groups without spread", "share of groups", ("frac_reward_zero_std", "frac_groups_kept")),
    Panel("errors of rewards", "share of answers", ("rewards/*/error_rate",)),
    Panel(
        "held-out metrics",
        "value",
        ("eval_*",),
        ("*/low", "*/high", "eval_reward", "eval_completions*", "eval_seconds*", "eval_peak_*"),
    ),
    Panel("divergence from the reference", "nats a step (k3)", ("kl", "kl/*")),
    Panel("entropy", "nats a step", ("entropy",)),
    Panel(
        "answer length",
        "steps: tokens, or denoising steps",
        ("completions/mean_length", "completions/max_length", "completions/min_length"),
    ),
    Panel("answers cut short", "share of answers", ("completions/clipped_ratio",)),
    Panel("clipped steps", "share of steps beyond the ratio's bounds", ("clip_ratio/*",)),
    Panel(
        "mismatch of engine and policy", "nats a step", ("sampling/sampling_logp_difference/*", "sampling/kl")
    ),
    Panel(
        "importance weights of the engine",
        "mean ratio; effective share of rows and steps",
        ("sampling/importance_sampling_ratio/*", "sampling/ess/*"),
    ),
    Panel("collections on both engines", "seconds", ("rollout/seconds", "rollout/exact_seconds")),
    Panel("answers of the exact engine", "share that is the same", ("rollout/agreement",)),
    Panel("loss", "", ("loss",)),
    Panel("gradient", "norm before clipping", ("grad_norm",)),
    Panel("learning rate", "", ("learning_rate",)),
    Panel("throughput", "rollouts a second", ("time/rollouts_per_second",)),
    Panel("throughput in steps", "steps of rollouts a second", ("time/steps_per_second",)),
)
OTHERS = Panel(
    "others", "value", ("*",), ("*/low", "*/high", "step", "step_time", "time/*", "*_std", "*/std")
)
SAME = 1e-6  # numbers that differ by less than this share of their size are equal
JOURNAL_ONLY = ("completions/*", "rewards/*", "eval_*")  # drawn only where a panel asks for them


def curves(runs: Runs) -> list[Markup]:
    """Draw metrics: of one run a chart per panel, of several a chart per metric with a line per run."""
    figures = []
    flat = constants(runs)
    for panel in (*PANELS, OTHERS):
        names = [name for name in _names(runs, panel) if name not in flat]
        if len(runs) > 1:
            for name in names:
                lines = [_line(run, records, name, i) for i, (run, records) in enumerate(runs.items())]
                chart = line_chart([line for line in lines if line.x], unit=panel.unit)
                figures.append(macros().figure(name if len(names) > 1 else panel.title, chart))
        elif names:
            records = next(iter(runs.values()))
            chart = line_chart([_line(panel.label(name), records, name) for name in names], unit=panel.unit)
            figures.append(macros().figure(panel.title, chart, ", ".join(panel.patterns)))
    if flat:
        listed = ", ".join(f"{name} {spelled(value)}" for name, value in sorted(flat.items()))
        figures.append(macros().figure("constant metrics", macros().note(listed)))
    return figures


def constants(runs: Runs) -> dict[str, float]:
    """List drawn metrics that have the same value in every record of every run, of two records or more."""
    flat = {}
    for name in {name for panel in (*PANELS, OTHERS) for name in _names(runs, panel)}:
        values = [y for records in runs.values() for y in _line(name, records, name).y]
        if len(values) > 1 and max(values) - min(values) < max(EQUAL, SAME * max(map(abs, values))):
            flat[name] = values[0]
    return flat


def _names(runs: Runs, panel: Panel) -> list[str]:
    """List the metrics of a panel that have a finite value; `OTHERS` has what no other panel has."""
    names = sorted({name for records in runs.values() for record in records for name in record})
    matching = [name for name in names if _fits(name, panel.patterns) and not _fits(name, panel.but)]
    if panel is OTHERS:
        drawn = {name for known in PANELS for name in names if _fits(name, known.patterns)}
        matching = [name for name in matching if name not in drawn and not _fits(name, JOURNAL_ONLY)]
    return [n for n in matching if any(_finite(record, n) for records in runs.values() for record in records)]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _finite(record: Mapping[str, Any], *names: str) -> bool:
    return all(math.isfinite(record.get(name, math.nan)) for name in names)


def _line(label: str, records: Records, name: str, place: int | None = None) -> Line:
    """Collect the finite values of a metric, with their interval where every one has it."""
    known = [record for record in records if _finite(record, name)]
    ends = (f"{name}/low", f"{name}/high")
    band = [(record[ends[0]], record[ends[1]]) for record in known if _finite(record, *ends)]
    steps, values = [record["step"] + 1 for record in known], [record[name] for record in known]
    return Line(label, steps, values, place, band if len(band) == len(known) else ())


def frontier(runs: Runs, against: str = "kl") -> Markup:
    """Draw the reward against the divergence from the reference, where the latter was measured."""
    lines = []
    for i, (run, records) in enumerate(runs.items()):
        known = [record for record in records if _finite(record, against, "reward")]
        if len(known) > 1:
            x, y = [record[against] for record in known], [record["reward"] for record in known]
            lines.append(Line(run, x, y, i))
    if not lines:
        return Markup()
    chart = frontier_chart(lines, x_label="kl: nats a step from the reference", unit="reward, one dot a step")
    note = macros().note(
        "Ring: the start. Full dot: the end. Up: more reward. Right: farther from the reference."
    )
    return macros().figure("reward against divergence", chart + note)


def seconds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Split the seconds of a step: rollout, reward, learning, what else was timed, and the rest."""
    parts = {
        name.removeprefix("time/"): record[name]
        for name in record
        if name.startswith("time/") and not name.endswith("_per_second")
    }
    rest = record.get("step_time", 0.0) - sum(parts.values())
    return {name: max(0.0, value) for name, value in {**parts, "other": rest}.items()}


def mean_seconds(records: Records) -> dict[str, float]:
    """Average the parts of a step's seconds over all steps; a part that took no time is left out."""
    split = [seconds_of(record) for record in records if "step_time" in record]
    names = dict.fromkeys(["rollout", "reward", "learn", *(name for parts in split for name in parts)])
    means = {name: sum(parts.get(name, 0.0) for parts in split) / max(len(split), 1) for name in names}
    return {name: value for name, value in means.items() if value > 0}


def time_split(records: Records) -> Markup:
    """Draw the seconds of every step as stacked areas, one a part."""
    timed = [record for record in records if "step_time" in record]
    names = mean_seconds(timed)
    if not names:
        return Markup()
    split = [seconds_of(record) for record in timed]
    steps = [record["step"] + 1 for record in timed]
    lines = [Line(name, steps, [parts.get(name, 0.0) for parts in split]) for name in names]
    return macros().figure("where the time goes", area_chart(lines, unit="seconds a step, stacked"))
