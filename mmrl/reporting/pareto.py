"""Results of several settings of a model: Pareto front, table, plot and page of quality against costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mmrl.config.schema import as_plain
from mmrl.reporting.html import document
from mmrl.reporting.html.charts import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart_style, svg_of
from mmrl.reporting.html.layout import amount, macros, table
from mmrl.reporting.html.point_labels import label_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Estimate = tuple[float, float, float]  # a value and the ends of its interval

FRONT, OTHERS = COLOURS[0], "#6b7a89"  # of points on the Pareto front, and of the others


@dataclass(frozen=True)
class SettingResult:
    """Result of one setting."""

    changes: Mapping[str, Any]  # configuration keys that it sets, with their values
    quality: Mapping[str, Estimate]  # every metric
    difference: Mapping[str, Estimate]  # every metric minus that of the first setting on the same prompts
    costs: Mapping[str, float]  # per prompt


@dataclass(frozen=True)
class SettingsComparison:
    """Results of all settings by name, and the metric that is compared with their costs."""

    rows: Mapping[str, SettingResult]
    metric: str
    greater_is_better: bool = True
    prompts: int = 0

    @property
    def costs(self) -> list[str]:
        """List the names of the costs, which are the same for all settings."""
        return list(next(iter(self.rows.values())).costs)

    def optimal(self, cost: str) -> list[str]:
        """List the settings on the Pareto front of the metric and a cost, cheapest first."""
        sign = 1 if self.greater_is_better else -1
        points = {
            name: (row.costs[cost], -sign * row.quality[self.metric][0])  # both to be minimised
            for name, row in self.rows.items()
            if not math.isnan(row.quality[self.metric][0])
        }
        return sorted(pareto_front(points), key=points.__getitem__)


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """List the points that no other dominates; smaller is better in both numbers."""

    def dominated(point: tuple[float, float]) -> bool:
        return any(x <= point[0] and y <= point[1] and (x, y) != point for x, y in points.values())

    return [name for name, point in points.items() if not dominated(point)]


def plain(compared: SettingsComparison) -> dict[str, Any]:
    """Convert a comparison to JSON: numbers and the ends of their intervals."""
    settings = {}
    for name, row in compared.rows.items():
        written: dict[str, Any] = {"changes": as_plain(row.changes)}
        for key, intervals, estimates in (
            ("metrics", "intervals", row.quality),
            ("differences", "intervals_of_differences", row.difference),
        ):
            written[key] = {metric: estimate[0] for metric, estimate in estimates.items()}
            written[intervals] = {metric: list(estimate[1:]) for metric, estimate in estimates.items()}
        settings[name] = {**written, "costs_per_prompt": dict(row.costs)}
    optimal = {cost: compared.optimal(cost) for cost in compared.costs}
    metric, prompts = compared.metric, compared.prompts
    return {"prompts": prompts, "target_metric": metric, "settings": settings, "optimal": optimal}


def cells(compared: SettingsComparison) -> tuple[list[str], list[list[str]]]:
    """Lay out a table as titles and rows; a star marks costs at which a setting is on the Pareto front."""
    first, reference = next(iter(compared.rows.items()))
    metrics = list(dict.fromkeys(metric for row in compared.rows.values() for metric in row.quality))
    titles = ["setting", *(title for m in metrics for title in (m, f"difference to {first}"))]
    titles += [f"{cost} per prompt" for cost in compared.costs]
    optimal = {cost: compared.optimal(cost) for cost in compared.costs}
    lines = []
    for name, row in compared.rows.items():
        line = [name]
        for metric in metrics:
            for estimates, form in ((row.quality, ".3f"), ({} if name == first else row.difference, "+.3f")):
                known = metric in estimates
                line.append("{:{f}} ({:{f}} to {:{f}})".format(*estimates[metric], f=form) if known else "")
        for cost, spent in row.costs.items():
            ratio = f" ({spent / reference.costs[cost]:.2f}x)" if reference.costs[cost] else ""
            line.append(f"{amount(spent)}{ratio}{' *' if name in optimal[cost] else ''}")
        lines.append(line)
    return titles, lines


def spell_row(row: SettingResult) -> str:
    """Write the metrics and costs of a setting in one line."""
    metrics = [f"{metric} {estimate[0]:.4g}" for metric, estimate in row.quality.items()]
    return "  ".join([*metrics, *(f"{cost} {amount(spent)}" for cost, spent in row.costs.items())])


def show(compared: SettingsComparison) -> None:
    """Print the table of a comparison."""
    from rich.console import Console
    from rich.table import Table

    titles, lines = cells(compared)
    printed = Table(*titles, box=None, pad_edge=False)
    for line in lines:
        printed.add_row(*line)
    console = Console()
    (console if console.is_terminal else Console(width=300)).print(printed)
    print(f"* no other setting has a better {compared.metric} for no more of this cost")


def page(title: str, compared: SettingsComparison, plots: Sequence[str]) -> str:
    """Build the page of a comparison: table, a plot (SVG) for every cost, and what the settings change."""
    metric, part = compared.metric, macros()
    note = part.note(
        f"All answered the same {compared.prompts} prompts. Intervals are of prompts drawn anew, the same "
        "for all settings, so differences are of pairs. * No other setting has a better "
        f"{metric} for no more of this cost."
    )
    key = part.note(
        f"Filled and joined: no other setting has a better {metric} for no more of this cost. Hollow: "
        "another has. Upright lines: intervals. Settings at one point share its label, one a line."
    )
    figures = [
        part.figure(f"{metric} against {cost}", Markup(plot))
        for cost, plot in zip(compared.costs, plots, strict=True)
    ]
    changes = [[name, json.dumps(as_plain(row.changes))] for name, row in compared.rows.items()]
    sections = [
        ("costs", f"{metric} and costs", part.grid(figures) + key),
        ("changes", "What they change", table(["setting", "changes"], changes, kind="value")),
    ]
    return document(title, [table(*cells(compared))], sections, heading="Settings", subtitle=note)


def draw(compared: SettingsComparison, costs: Sequence[str]) -> str:
    """Plot the metric against costs as SVG, a panel each; the Pareto front is filled and joined."""
    from matplotlib.figure import Figure

    # Labels of many settings need more room.
    width, height = WIDTH * len(costs), HEIGHT + 20 * max(0, len(compared.rows) - 4)
    size = ((WIDTH - LEFT - RIGHT) / width, (height - TOP - BOTTOM) / height)
    with chart_style(salt=repr((costs, compared))):
        figure = Figure((width / 72, height / 72), dpi=72)
        for i, cost in enumerate(costs):
            draw_panel(figure.add_axes(((i * WIDTH + LEFT) / width, BOTTOM / height, *size)), compared, cost)
        return svg_of(figure)


def draw_panel(axes: Axes, compared: SettingsComparison, cost: str) -> None:
    """Plot the metric against one cost; settings whose metric is not a number are left out."""
    rows = {
        name: row for name, row in compared.rows.items() if math.isfinite(row.quality[compared.metric][0])
    }
    best = compared.optimal(cost)
    at = {name: (row.costs[cost], row.quality[compared.metric][0]) for name, row in rows.items()}
    axes.plot(*zip(*(at[name] for name in best), strict=True), color="#b8c4d0", linewidth=1.4)
    for name, row in rows.items():
        (x, y), (_, low, high) = at[name], row.quality[compared.metric]
        axes.errorbar(
            x,
            y,
            # Resampled ends may lie on one side of the value; matplotlib wants lengths of 0 or more.
            [[max(0.0, y - low)], [max(0.0, high - y)]],
            fmt="o",
            color=FRONT if name in best else OTHERS,
            markerfacecolor=FRONT if name in best else "#ffffff",
            # A ring is seen around a dot at the same point.
            markersize=5.5 if name in best else 8.0,
            zorder=3 if name in best else 2,
            elinewidth=0.8,
        )
    axes.set(xlabel=f"{cost} per prompt", ylabel=compared.metric)
    if not rows:
        return
    set_axes(axes, [x for x, _ in at.values()])
    axes.yaxis.set_label_coords((14 - LEFT) / (WIDTH - LEFT - RIGHT), 0.5)
    pixels = axes.transData.transform
    points = dict(zip(at, pixels([*at.values()]).tolist(), strict=True))
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in points.values()]
    for name, (x, _) in points.items():
        (_, low), (_, high) = pixels([(at[name][0], end) for end in rows[name].quality[compared.metric][1:]])
        taken.append((x - 2, low, x + 2, high))
    for (x0, y0), (x1, y1) in pairwise(points[name] for name in best):  # the line, as a row of small boxes
        for share in (i / 40 for i in range(41)):
            x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
            taken.append((x - 1, y - 1, x + 1, y + 1))
    label_points(axes, [*at], [(x, y) for x, y in points.values()], taken)


def set_axes(axes: Axes, amounts: Sequence[float]) -> None:
    """Choose a linear or a logarithmic axis of costs, ticks, and how numbers are written at them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.margins(x=0.1, y=0.1)
    axes.locator_params(nbins=5, steps=[1, 2, 5, 10])
    if min(amounts) > 0 and max(amounts) > 10 * min(amounts):
        axes.set_xscale("log")
        decades = math.log10(max(amounts) / min(amounts))
        ticks = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3 else (1,)
        axes.xaxis.set_major_locator(LogLocator(subs=ticks))
        axes.xaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, 6)))
    axes.autoscale_view()
