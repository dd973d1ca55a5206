"""Several settings of a model on the same prompts: how good each is, what it spends, and which of them no
other beats at both."""

from __future__ import annotations

import difflib
import html
import io
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.build import check_measuring, load_evaluator
from mmrl.config.binding import Bound, Pieces
from mmrl.config.schema import ConfigError, EvaluateConfig, as_plain
from mmrl.config.sweep import settings_of
from mmrl.core.protocols import Engine
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.reporting.html import document
from mmrl.training.evaluate import CHUNK, Evaluator

WARM = 8  # prompts that are answered before anything is timed
SECONDS = "seconds"

Spread = tuple[float, float, float]  # a number, and where it falls from and to


@dataclass(frozen=True)
class Row:
    """What was found of one setting: every metric, its difference to the first setting on the same prompts,
    and what a prompt costs."""

    changes: Mapping[str, Any]
    quality: Mapping[str, Spread]
    difference: Mapping[str, Spread]
    costs: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """All settings by their names, and the metric that is set against costs."""

    rows: Mapping[str, Row]
    metric: str
    greater_is_better: bool = True
    prompts: int = 0

    @property
    def costs(self) -> list[str]:
        """Name what was metered, which is the same for all."""
        return list(next(iter(self.rows.values())).costs)

    def optimal(self, cost: str) -> list[str]:
        """Name the settings that no other beats in the metric and in a cost, cheapest first."""
        sign = 1 if self.greater_is_better else -1
        points = {
            name: (row.costs[cost], -sign * row.quality[self.metric][0])
            for name, row in self.rows.items()
            if not math.isnan(row.quality[self.metric][0])
        }
        return sorted(front(points), key=lambda name: points[name])


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Name the points that no other equals or undercuts in both numbers, and undercuts in one."""

    def beaten(mine: tuple[float, float]) -> bool:
        return any(x <= mine[0] and y <= mine[1] and (x, y) != mine for x, y in points.values())

    return [name for name, mine in points.items() if not beaten(mine)]


# ---- measuring


def check_settings(config: EvaluateConfig) -> dict[str, EvaluateConfig]:
    """Resolve every name and option of every setting and meter, without loading anything."""
    check_measuring(config)
    settings = settings_of(config)
    for name, one in settings.items():
        try:
            check_measuring(one)
        except ConfigError as error:
            raise ConfigError(f"settings.{name}: {error}") from error
    make_meters(config)
    return settings


def make_meters(config: EvaluateConfig) -> list[Bound]:
    """Bind what meters costs."""
    pieces = Pieces(Stream(config.seed))
    return [
        pieces.make("cost", piece, place=f"cost_metrics[{i}]") for i, piece in enumerate(config.cost_metrics)
    ]


def compare(config: EvaluateConfig, folder: Path) -> Comparison:
    """Measure the settings one after another, so that one model is held at a time.

    `evaluation.json` is written anew after each, `pareto.svg` and `evaluation.html` at the end.
    """
    settings, meters = check_settings(config), make_meters(config)
    for one in settings.values():
        check_measuring(one).require_packages()
    _pyplot()  # what draws at the end is found missing before anything is measured
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    first: Resampled | None = None
    for name, one in settings.items():
        evaluator = load_evaluator(one)
        mine, costs = measure(evaluator, meters)
        first = first or mine
        rows[name] = describe(evaluator, mine, first, config.settings[name], costs)
        asked = len(set(mine.uids))
        found = Comparison(rows, metric_of(config, mine), config.greater_is_better, asked)
        if evaluator.processes.main:
            (folder / "evaluation.json").write_text(json.dumps(plain(found), indent=2))
            print(f"{name}: {_in_a_line(rows[name])}", flush=True)
    if evaluator.processes.main:
        drawn = draw(found)
        (folder / "pareto.svg").write_text(drawn)
        (folder / "evaluation.html").write_text(page(folder.name, found, drawn))
    return found


@dataclass(frozen=True)
class Resampled:
    """Metrics of one setting, and of as many draws of its prompts."""

    uids: tuple[str, ...]
    values: Mapping[str, float]
    drawn: Mapping[str, Tensor]


def measure(evaluator: Evaluator, meters: Sequence[Bound]) -> tuple[Resampled, dict[str, float]]:
    """Answer all prompts timed, and the first `CHUNK` once more metered, which is slow."""
    engine = Clock(evaluator.engine)
    evaluator = replace(evaluator, engine=engine)
    some = [prompt for prompt in evaluator.data[:CHUNK] for _ in range(evaluator.num_generations)]
    whole = evaluator.processes.whole
    with torch.no_grad(), whole(engine.policy.module):
        engine.rollout(some[: WARM * evaluator.num_generations])
    engine.taken.clear()
    measured = evaluator.measure(intervals=False)
    seconds = statistics.median(engine.taken)
    with torch.no_grad(), whole(engine.policy.module):
        costs = spend(engine.engine, some, meters)
    drawn = evaluator.resample(measured.table)
    values = {name: float(measured.metrics[name]) for name in drawn}
    return Resampled(measured.table.uids, values, drawn), {**costs, SECONDS: seconds}


class Clock:
    """Times an engine: seconds per prompt of every call."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy, self.notes = engine, engine.policy, engine.notes
        self.taken: list[float] = []

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the engine."""
        began = time.perf_counter()
        rows = self.engine.rollout(prompts)
        self.taken.append((time.perf_counter() - began) / len({prompt.uid for prompt in prompts}))
        return rows


def spend(engine: Engine, prompts: Sequence[Prompt], meters: Sequence[Bound]) -> dict[str, float]:
    """Answer prompts, and read meters: what each says, per prompt."""
    with ExitStack() as stack:
        read = [stack.enter_context(meter(engine)) for meter in meters]
        engine.rollout(prompts)
    count = len({prompt.uid for prompt in prompts})
    return {name: amount / count for spent in read for name, amount in spent.items()}


def describe(
    evaluator: Evaluator,
    mine: Resampled,
    first: Resampled,
    changes: Mapping[str, Any],
    costs: Mapping[str, float],
) -> Row:
    """Give numbers their intervals. Draws of prompts are the same for all settings, so differences are of
    pairs."""
    if mine.uids != first.uids:
        raise ValueError(
            f"settings are compared prompt by prompt, but one answered {len(first.uids)} rows and the next "
            f"{len(mine.uids)}, or others; leave the engines' wrappers the same"
        )
    quality = {name: (mine.values[name], *evaluator.interval(drawn)) for name, drawn in mine.drawn.items()}
    both = [name for name in quality if name in first.drawn]
    gap = {
        name: (
            mine.values[name] - first.values[name],
            *evaluator.interval(mine.drawn[name] - first.drawn[name]),
        )
        for name in both
    }
    return Row(changes, quality, gap, costs)


def metric_of(config: EvaluateConfig, found: Resampled) -> str:
    """Name the metric that is set against costs."""
    name = config.target_metric or next(iter(found.values))
    if name not in found.values:
        near = difflib.get_close_matches(name, found.values, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(found.values)}"
        raise ConfigError(f"quality: no metric is called '{name}'; {hint}")
    return name


# ---- showing


def plain(found: Comparison) -> dict[str, Any]:
    """Give what JSON holds: numbers, with the ends of their intervals."""
    settings = {
        name: {
            "changes": as_plain(row.changes),
            "metrics": {metric: spread[0] for metric, spread in row.quality.items()},
            "intervals": {metric: list(spread[1:]) for metric, spread in row.quality.items()},
            "differences": {metric: spread[0] for metric, spread in row.difference.items()},
            "intervals_of_differences": {m: list(spread[1:]) for m, spread in row.difference.items()},
            "costs_per_prompt": dict(row.costs),
        }
        for name, row in found.rows.items()
    }
    optimal = {cost: found.optimal(cost) for cost in found.costs}
    return {"prompts": found.prompts, "target_metric": found.metric, "settings": settings, "optimal": optimal}


def cells(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Lay out a table: titles, and a row for each setting. A star marks costs at which no other is better."""
    metrics = list(dict.fromkeys(metric for row in found.rows.values() for metric in row.quality))
    first, *others = found.rows
    titles = ["setting", *(title for m in metrics for title in (m, f"difference to {first}"))]
    titles += [f"{cost} per prompt" for cost in found.costs]
    optimal = {cost: found.optimal(cost) for cost in found.costs}
    lines = []
    for name, row in found.rows.items():
        line = [name]
        for metric in metrics:
            line.append(_spread(row.quality.get(metric), ".3f"))
            line.append(_spread(row.difference.get(metric), "+.3f") if name in others else "")
        for cost in found.costs:
            star = " *" if name in optimal[cost] else ""
            line.append(_cost(row.costs[cost], found.rows[first].costs[cost]) + star)
        lines.append(line)
    return titles, lines


def _spread(spread: Spread | None, how: str) -> str:
    return "" if spread is None else f"{spread[0]:{how}} ({spread[1]:{how}} to {spread[2]:{how}})"


def _cost(mine: float, first: float) -> str:
    return f"{mine:.3g}" + (f" ({mine / first:.2f}x)" if first else "")


def _in_a_line(row: Row) -> str:
    told = [f"{metric} {spread[0]:.4g}" for metric, spread in row.quality.items()]
    return "  ".join([*told, *(f"{cost} {amount:.3g}" for cost, amount in row.costs.items())])


def show(found: Comparison) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    titles, lines = cells(found)
    table = Table(*titles, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    console = Console()
    (console if console.is_terminal else Console(width=300)).print(table)
    print(f"* no other setting has a better {found.metric} for no more of this cost")


def page(title: str, found: Comparison, drawn: str) -> str:
    """Make a page of the table and the plot."""
    titles, lines = cells(found)
    head = "".join(f"<th>{html.escape(one)}</th>" for one in titles)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(one)}</td>' for one in rest)}</tr>"
        for name, *rest in lines
    )
    changes = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(json.dumps(as_plain(row.changes)))}</td></tr>"
        for name, row in found.rows.items()
    )
    return document(
        title,
        [
            f"<h1>Settings</h1><p class=note>All answered the same {found.prompts} prompts. Intervals are "
            "of prompts drawn anew, the same for all settings, so differences are of pairs. * No other "
            f"setting has a better {html.escape(found.metric)} for no more of this cost.</p>",
            f"<div class=wide><table><tr>{head}</tr>{body}</table></div>",
            f"<h2>{html.escape(found.metric)} and costs</h2><figure>{drawn}</figure>",
            f"<h2>What they change</h2><div class=wide><table>{changes}</table></div>",
        ],
    )


def draw(found: Comparison) -> str:
    """Draw the metric against every cost, as SVG; settings that no other beats are filled and joined."""
    pyplot = _pyplot()
    style = {"svg.fonttype": "none", "svg.hashsalt": "mmrl", "font.size": 9}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        costs = found.costs
        size = (max(6.0, 3.6 * len(costs)), 3.4 + 0.06 * len(found.rows))
        figure, panels = pyplot.subplots(
            1, len(costs), figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        for axes, cost in zip(panels[0], costs, strict=True):
            _panel(axes, found, cost)
        panels[0, 0].set_ylabel(found.metric)
        marks, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(marks, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot


def _panel(axes: Any, found: Comparison, cost: str) -> None:
    best = found.optimal(cost)
    line = [(found.rows[name].costs[cost], found.rows[name].quality[found.metric][0]) for name in best]
    axes.plot([x for x, _ in line], [y for _, y in line], color="#b8c4d0", linewidth=1.4)
    for number, (name, row) in enumerate(found.rows.items()):
        middle, low, high = row.quality[found.metric]
        spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar(
            row.costs[cost],
            middle,
            spread,
            fmt=MARKS[number // 10 % len(MARKS)],
            color=f"C{number % 10}",
            elinewidth=0.7,
            fillstyle="full" if name in best else "none",
            label=name,
        )
    amounts = [row.costs[cost] for row in found.rows.values()]
    if min(amounts) > 0 and max(amounts) > 10 * min(amounts):
        axes.set_xscale("log")
    axes.set_xlabel(f"{cost} per prompt")
    axes.margins(x=0.1, y=0.1)
    axes.grid(alpha=0.25)


MARKS = "os^Dv"
