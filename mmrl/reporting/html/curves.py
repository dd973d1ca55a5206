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
    """A chart of the metrics whose names match one of `patterns` and none of `but` (shell wildcards)."""

    title: str
    unit: str
    patterns: str
    but: str = "*/low */high"  # ends of intervals

    def label(self, name: str) -> str:
        """Name a line by the part of its metric's name that a single pattern leaves open."""
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
    Panel("collections on both engines", "seconds", "rollout/seconds rollout/exact_seconds"),
    Panel("answers of the exact engine", "share that is the same", "rollout/agreement"),
    Panel("loss", "", "loss"),
    Panel("gradient", "norm before clipping", "grad_norm"),
    Panel("learning rate", "", "learning_rate"),
    Panel("throughput", "rollouts a second", "time/rollouts_per_second"),
    Panel("throughput in steps", "steps of rollouts a second", "time/steps_per_second"),
)
# What no panel above has. Completions, rewards and evaluations are drawn only where a panel asks for them.
LEFT_OUT = "*/low */high step step_time time/* *_std */std completions/* rewards/* eval_*"
OTHERS = Panel("others", "value", "*", but=LEFT_OUT)
SAME = 1e-6  # numbers that differ by less than this share of their size are equal


def curves(runs: Runs) -> list[Markup]:
    """Draw metrics: of one run a chart per panel, of several a chart per metric with a line per run."""
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
    """Assign metrics that have a finite value to panels; `OTHERS` has those that no other panel matches."""
    records = [record for records in runs.values() for record in records]
    names = {name for record in records for name in record if is_finite(record, name)}

    def matching(patterns: str) -> set[str]:
        return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns.split())}

    inside = {panel: matching(panel.patterns) - matching(panel.but) for panel in (*PANELS, OTHERS)}
    inside[OTHERS] -= matching(" ".join(panel.patterns for panel in PANELS))  # those that `but` excludes, too
    return {panel: sorted(members) for panel, members in inside.items()}


def is_finite(record: Mapping[str, Any], *names: str) -> bool:
    """Return whether a record has finite values of all these metrics."""
    return all(math.isfinite(record.get(name, math.nan)) for name in names)


def constants(runs: Runs, names: Sequence[str]) -> dict[str, float]:
    """List metrics that have the same value in every record of every run, of two records or more."""
    flat = {}
    for name in names:
        values = [y for records in runs.values() for y in finite(line_of(name, records, name).y)]
        if len(values) > 1 and max(values) - min(values) < max(EQUAL, SAME * max(map(abs, values))):
            flat[name] = values[0]
    return flat


def line_of(label: str, records: Records, name: str, place: int = 0) -> Line:
    """Collect the values of a metric, NaN where one is not finite, with their interval where all have it."""
    known = [record for record in records if name in record]
    low, high = f"{name}/low", f"{name}/high"
    # An interval that some points lack is not drawn at all.
    complete = all(is_finite(record, low, high) for record in known if is_finite(record, name))
    band = [(record.get(low, math.nan), record.get(high, math.nan)) for record in known] if complete else ()
    steps = [steps_taken(record) for record in known]
    values = [record[name] if is_finite(record, name) else math.nan for record in known]
    return Line(label, steps, values, place, band)


def frontier(runs: Runs) -> Markup:
    """Draw the reward against the divergence from the reference, where the latter was measured."""
    lines = []
    for i, (run, records) in enumerate(runs.items()):
        points = [(record["kl"], record["reward"]) for record in records if is_finite(record, "kl", "reward")]
        if len(points) > 1:
            lines.append(Line(run, *zip(*points, strict=True), place=i))
    if not lines:
        return Markup()
    labels = {"unit": "reward, one dot a step", "x_label": "kl: nats a step from the reference"}
    note = "Ring: the start. Full dot: the end. Up: more reward. Right: farther from the reference."
    return macros().figure("reward against divergence", chart(lines, "path", **labels) + macros().note(note))


def seconds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Split the seconds of a step: rollout, reward, learning, what else was timed, and the rest."""
    parts = {
        name.removeprefix("time/"): seconds
        for name, seconds in record.items()
        if name.startswith("time/") and not name.endswith("_per_second")
    }
    rest = record.get("step_time", 0.0) - sum(parts.values())  # below 0 by the clock's rounding
    return {name: max(0.0, value) for name, value in {**parts, "other": rest}.items()}


def mean_seconds(records: Records) -> dict[str, float]:
    """Average the parts of a step's seconds over all steps; a part that took no time is left out."""
    split = [seconds_of(record) for record in records if "step_time" in record]
    names = dict.fromkeys(["rollout", "reward", "learn", *(name for parts in split for name in parts)])
    means = {name: sum(parts.get(name, 0.0) for parts in split) / max(len(split), 1) for name in names}
    return {name: value for name, value in means.items() if value > 0}


def time_split(records: Records) -> Markup:
    """Draw the seconds of every step as stacked areas, one a part."""
    steps = {record["step"] + 1: seconds_of(record) for record in records if "step_time" in record}
    lines = [
        Line(name, list(steps), [parts.get(name, 0.0) for parts in steps.values()], i)
        for i, name in enumerate(mean_seconds(records))
    ]
    if not lines:
        return Markup()
    return macros().figure("where the time goes", chart(lines, "area", unit="seconds a step, stacked"))
