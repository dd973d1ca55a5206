"""Charts of a run's metrics: which metrics share a chart, and its title and unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from markupsafe import Markup

from mmrl.core.reward_table import EQUAL
from mmrl.reporting.html.charts import Line, chart, finite
from mmrl.reporting.html.layout import macros, spelled
from mmrl.reporting.metrics import steps_taken

Records = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Records]


@dataclass(frozen=True)
class Panel:
    """A chart of all metrics that match one of `patterns` and none of `but` (shell wildcards)."""

    title: str
    unit: str
    patterns: str
    but: str = "*/low */high"  # exclude interval bounds

    def label(self, name: str) -> str:
        """Return a metric's legend: its name, or if there is one pattern, the part that `*` matches."""
        before, star, after = self.patterns.partition("*")
        return name.removeprefix(before).removesuffix(after) if star and " " not in self.patterns else name


HEADLINES = {
    "reward": "reward",
    "kl": "kl to the reference, nats a step",
    "entropy": "entropy, nats a step",
    "completions/mean_length": "steps of a rollout, mean",
    "frac_reward_zero_std": "groups without spread, share",
    "clip_ratio/region_mean": "clipped steps, share",
    "step_time": "seconds a step",
    "time/rollouts_per_second": "rollouts a second",
}
PANELS = (
    Panel("reward", "weighted sum of the rewards", "reward eval_reward"),
    Panel("rewards by name", "mean, each in its own unit", "rewards/*/mean"),
    Panel("share of the advantage", "share of each reward; 1 in all", "rewards/*/advantage_share"),
    Panel("spread inside groups", "standard deviation among answers to one prompt", "rewards/*/group_std"),
    Panel("groups without spread", "share of groups", "frac_reward_zero_std frac_groups_kept"),
    Panel("errors of rewards", "share of answers", "rewards/*/error_rate"),
    Panel(
        "held-out metrics",
        "value",
        "eval_*",
        but="*/low */high eval_reward eval_completions* eval_seconds* eval_peak_*",
    ),
    Panel("divergence from the reference", "nats a step (k3)", "kl kl/*"),
    Panel("entropy", "nats a step", "entropy"),
    Panel(
        "steps of a rollout", "tokens, or denoising steps", "completions/*_length", but="*terminated_length"
    ),
    Panel("answers cut short", "share of answers", "completions/clipped_ratio"),
    Panel("clipped steps", "share of steps beyond the ratio's bounds", "clip_ratio/*"),
    Panel("mismatch of engine and policy", "nats a step", "sampling/sampling_logp_difference/* sampling/kl"),
    Panel(
        "importance weights of the engine",
        "mean ratio; effective share of rows and steps",
        "sampling/importance_sampling_ratio/* sampling/ess/*",
    ),
    Panel("age of weights", "steps", "sampling/age/mean sampling/age/max"),
    Panel("tokens of older weights", "share of tokens", "sampling/age/older_share"),
    Panel("collections on both engines", "seconds", "rollout/seconds rollout/exact_seconds"),
    Panel("answers of the exact engine", "share that is the same", "rollout/agreement"),
    Panel("loss", "", "loss"),
    Panel("gradient", "norm before clipping", "grad_norm"),
    Panel("learning rate", "", "learning_rate"),
    Panel("throughput", "rollouts a second", "time/rollouts_per_second"),
    Panel("throughput in steps", "steps of rollouts a second", "time/steps_per_second"),
    Panel("energy", "joules a step, whole devices", "energy/*"),
)
# Metrics that match these patterns are not shown in `OTHERS`, the panel of all remaining metrics.
LEFT_OUT = "*/low */high step step_time time/* *_std */std completions/* rewards/* eval_*"
OTHERS = Panel("others", "value", "*", but=LEFT_OUT)
SAME = 1e-6  # relative difference below which numbers count as equal


def curves(runs: Runs) -> list[Markup]:
    """Draw the charts of one run (one per panel) or of several (one per metric, with a line per run)."""
    figures = []
    panels = metrics_by_panel(runs)
    flat = constants(runs, [name for names in panels.values() for name in names])
    for panel, names in panels.items():
        names = [name for name in names if name not in flat]
        if len(runs) > 1:
            for name in names:
                lines = [line_of(run, records, name, i) for i, (run, records) in enumerate(runs.items())]
                drawn = chart([line for line in lines if finite(line.y)], unit=panel.unit)
                figures.append(macros().figure(name if len(names) > 1 else panel.title, drawn))
        elif names:
            (records,) = runs.values()
            lines = [line_of(panel.label(name), records, name, i) for i, name in enumerate(names)]
            figures.append(macros().figure(panel.title, chart(lines, unit=panel.unit), panel.patterns))
    if flat:
        listed = ", ".join(f"{name} {spelled(value)}" for name, value in sorted(flat.items()))
        figures.append(macros().figure("constant metrics", macros().note(listed)))
    return figures


def metrics_by_panel(runs: Runs) -> dict[Panel, list[str]]:
    """Map each panel to its metrics that have a finite value; metrics without a panel go to `OTHERS`."""
    records = [record for records in runs.values() for record in records]
    names = {name for record in records for name in record if is_finite(record, name)}

    def matching(patterns: str) -> set[str]:
        return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns.split())}

    inside = {panel: matching(panel.patterns) - matching(panel.but) for panel in (*PANELS, OTHERS)}
    inside[OTHERS] -= matching(" ".join(panel.patterns for panel in PANELS))  # including those in `but`
    return {panel: sorted(members) for panel, members in inside.items()}


def is_finite(record: Mapping[str, Any], *names: str) -> bool:
    """Whether all named metrics have a finite value in a record."""
    return all(math.isfinite(record.get(name, math.nan)) for name in names)


def constants(runs: Runs, names: Sequence[str]) -> dict[str, float]:
    """Return the metrics that have one constant value over all steps and runs, with this value."""
    flat = {}
    for name in names:
        values = [y for records in runs.values() for y in finite(line_of(name, records, name).y)]
        if len(values) > 1 and max(values) - min(values) < max(EQUAL, SAME * max(map(abs, values))):
            flat[name] = values[0]
    return flat


def line_of(label: str, records: Records, name: str, place: int = 0) -> Line:
    """Return a metric as a line over steps, with an interval band if every finite value has bounds."""
    measured = [record for record in records if name in record]
    low, high = f"{name}/low", f"{name}/high"
    complete = all(is_finite(record, low, high) for record in measured if is_finite(record, name))
    band = [(r.get(low, math.nan), r.get(high, math.nan)) for r in measured] if complete else ()
    steps = [steps_taken(record) for record in measured]
    values = [record[name] if is_finite(record, name) else math.nan for record in measured]
    return Line(label, steps, values, place, band)


def seconds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by activity; `other` is the time that no activity covers."""
    parts = {
        name.removeprefix("time/"): seconds
        for name, seconds in record.items()
        if name.startswith("time/") and not name.endswith("_per_second")
    }
    rest = record.get("step_time", 0.0) - sum(parts.values())  # rounding can make it negative
    return {name: max(0.0, value) for name, value in {**parts, "other": rest}.items()}


def time_split(records: Records) -> Markup:
    """Draw how many seconds each activity takes in every step, as stacked areas."""
    steps = {record["step"] + 1: seconds_of(record) for record in records if "step_time" in record}
    names = dict.fromkeys(
        ["rollout", "reward", "learn", *(name for parts in steps.values() for name in parts)]
    )
    series = {name: [parts.get(name, 0.0) for parts in steps.values()] for name in names}
    spent = {name: seconds for name, seconds in series.items() if sum(seconds) > 0}
    lines = [Line(name, list(steps), seconds, i) for i, (name, seconds) in enumerate(spent.items())]
    if not lines:
        return Markup()
    return macros().figure("where the time goes", chart(lines, "area", unit="seconds a step, stacked"))
