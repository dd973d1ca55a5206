"""Which numbers of a journal stand in one picture, and under what words."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mmrl.core.reward_table import EQUAL
from mmrl.reporting.html.charts import Line, area_chart, frontier_chart, line_chart, spelled

Records = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Records]


@dataclass(frozen=True)
class Panel:
    """Numbers of one kind: the metrics whose names fit one of `patterns`, but none of `but`."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    but: tuple[str, ...] = ("*/low", "*/high")  # ends of intervals

    def label(self, name: str) -> str:
        """Name a line by what its metric's name has besides the pattern's."""
        before, star, behind = self.patterns[0].partition("*")
        return name.removeprefix(before).removesuffix(behind) if star and len(self.patterns) == 1 else name


PANELS = (
    Panel("reward", "weighted sum of the rewards", ("reward", "eval_reward")),
    Panel("rewards by name", "mean, each in its own unit", ("rewards/*/mean",)),
    Panel("share of the advantage", "share of each reward; 1 in all", ("rewards/*/share",)),
    Panel("spread inside groups", "standard deviation among answers to one prompt", ("rewards/*/group_std",)),
    Panel("groups that say nothing", "share of groups", ("frac_reward_zero_std", "frac_groups_kept")),
    Panel("faults of rewards", "share of answers", ("rewards/*/error_rate",)),
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
    Panel("gap to the engine", "nats a step", ("sampling/sampling_logp_difference/*", "sampling/kl")),
    Panel(
        "weights against the engine",
        "mean ratio; share of rows and steps that are left in effect",
        ("sampling/importance_sampling_ratio/*", "sampling/ess/*"),
    ),
    Panel("collections made both ways", "seconds", ("rollout/seconds", "rollout/exact_seconds")),
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
SAME = 1e-6  # numbers that differ by less than this share of their size are one
KNOWN = ("completions/*", "rewards/*", "eval_*")  # beyond the panels, these stay in the journal


def curves(runs: Runs) -> list[str]:
    """Draw what runs reported: a picture for every kind of number; of several runs one for every number, with
    a line a run."""
    drawn = []
    flat = constants(runs)
    for panel in (*PANELS, OTHERS):
        names = [name for name in _names(runs, panel) if name not in flat]
        if len(runs) > 1:
            for name in names:
                lines = [_line(run, records, name, i) for i, (run, records) in enumerate(runs.items())]
                drawn.append(_figure(name if len(names) > 1 else panel.title, panel.unit, lines))
        elif names:
            records = next(iter(runs.values()))
            lines = [_line(panel.label(name), records, name) for name in names]
            drawn.append(_figure(panel.title, panel.unit, lines, ", ".join(panel.patterns)))
    told = ", ".join(f"{name} {spelled(value)}" for name, value in sorted(flat.items()))
    drawn.append(figure("what never moved", f"<p class=note>{html.escape(told)}</p>") if told else "")
    return [figure for figure in drawn if figure]


def constants(runs: Runs) -> dict[str, float]:
    """List the numbers that are drawn and are the same in every record of every run, of which there are two
    or more."""
    found = {}
    for name in {name for panel in (*PANELS, OTHERS) for name in _names(runs, panel)}:
        values = [y for records in runs.values() for y in _line(name, records, name).y]
        if len(values) > 1 and max(values) - min(values) < max(EQUAL, SAME * max(map(abs, values))):
            found[name] = values[0]
    return found


def _names(runs: Runs, panel: Panel) -> list[str]:
    names = sorted({name for records in runs.values() for record in records for name in record})
    found = [name for name in names if _fits(name, panel.patterns) and not _fits(name, panel.but)]
    if panel is OTHERS:
        taken = {name for one in PANELS for name in names if _fits(name, one.patterns)}
        found = [name for name in found if name not in taken and not _fits(name, KNOWN)]
    return [name for name in found if any(_line(name, records, name).x for records in runs.values())]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _line(label: str, records: Records, name: str, place: int | None = None) -> Line:
    known = [record for record in records if _known(record, name)]
    ends = (f"{name}/low", f"{name}/high")
    band = [(record[ends[0]], record[ends[1]]) for record in known if _known(record, *ends)]
    return Line(
        label,
        [record["step"] + 1 for record in known],
        [record[name] for record in known],
        place,
        band if len(band) == len(known) else (),
    )


def _known(record: Mapping[str, Any], *names: str) -> bool:
    return all(math.isfinite(record.get(name, math.nan)) for name in names)


def _figure(title: str, unit: str, lines: Sequence[Line], names: str = "") -> str:
    lines = [line for line in lines if line.x]
    return figure(title, line_chart(lines, unit=unit), names) if lines else ""


def figure(title: str, inside: str, names: str = "") -> str:
    """Put a drawing under its caption; `names` are shown to whoever points at it."""
    hint = f" title='{html.escape(names)}'" if names else ""
    return f"<figure><figcaption{hint}>{html.escape(title)}</figcaption>{inside}</figure>"


def frontier(runs: Runs, against: str = "kl") -> str:
    """Draw the reward against the divergence from the reference: what was gained for how much was left
    behind. Nothing where no divergence was measured."""
    lines = []
    for i, (run, records) in enumerate(runs.items()):
        pairs = [
            (record[against], record["reward"]) for record in records if _known(record, against, "reward")
        ]
        lines.append(Line(run, [x for x, _ in pairs], [y for _, y in pairs], i))
    lines = [line for line in lines if len(line.x) > 1]
    if not lines:
        return ""
    drawn = frontier_chart(lines, x_label="kl: nats a step from the reference", unit="reward, one dot a step")
    note = "<p class=note>Ring: the start. Full dot: the end. Up is gained, right is left behind.</p>"
    return figure("reward against divergence", drawn + note)


def seconds_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Part the seconds of a step: rollout, reward, learning, what else was timed, and the rest."""
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


def time_split(records: Records) -> str:
    """Stack where the seconds of every step went."""
    split = [seconds_of(record) for record in records if "step_time" in record]
    if not split:
        return ""
    steps = [record["step"] + 1 for record in records if "step_time" in record]
    names = mean_seconds(records)
    lines = [Line(name, steps, [parts.get(name, 0.0) for parts in split]) for name in names]
    return figure("where the time goes", area_chart(lines, unit="seconds a step, stacked")) if lines else ""
