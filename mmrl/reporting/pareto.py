"""Comparison of model settings (such as cache sizes) by quality and cost: table, plots, HTML page."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mmrl.config.schema import as_plain
from mmrl.reporting.html import document
from mmrl.reporting.html.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, chart_style, style_of, svg_of
from mmrl.reporting.html.layout import amount, macros, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Estimate = tuple[float, float, float]  # value, lower and upper bound of its interval
LEGEND = 17  # height of one legend line, in points


@dataclass(frozen=True)
class SettingResult:
    """Metrics and costs of one setting."""

    changes: Mapping[str, Any]  # configuration keys that the setting changes, with their values
    quality: Mapping[str, Estimate]  # maps metrics to estimates
    difference: Mapping[str, Estimate]  # maps metrics to differences from the first setting
    costs: Mapping[str, float]  # costs per prompt, by name


@dataclass(frozen=True)
class SettingsComparison:
    """Results of all settings, keyed by name, and the metric that is plotted against the costs."""

    rows: Mapping[str, SettingResult]
    metric: str
    greater_is_better: bool = True
    prompts: int = 0

    @property
    def costs(self) -> list[str]:
        """Names of the cost metrics of the compared settings."""
        return list(next(iter(self.rows.values())).costs)

    def optimal(self, cost: str) -> list[str]:
        """List the settings on the Pareto front of the plotted metric and a cost, cheapest first."""
        sign = 1 if self.greater_is_better else -1
        points = {
            name: (row.costs[cost], -sign * row.quality[self.metric][0])  # both to be minimised
            for name, row in self.rows.items()
            if not math.isnan(row.quality[self.metric][0])
        }
        return sorted(pareto_front(points), key=points.__getitem__)


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """List the points that no other point dominates; smaller is better in both coordinates."""

    def dominated(point: tuple[float, float]) -> bool:
        return any(x <= point[0] and y <= point[1] and (x, y) != point for x, y in points.values())

    return [name for name, point in points.items() if not dominated(point)]


def plain(compared: SettingsComparison) -> dict[str, Any]:
    """Convert a comparison to JSON values: estimates with their intervals, costs, and optimal settings."""
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
    """Return the titles and rows of the table; a star marks a cost if its setting is on the Pareto front."""
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
                has = metric in estimates
                line.append("{:{f}} ({:{f}} to {:{f}})".format(*estimates[metric], f=form) if has else "")
        for cost, spent in row.costs.items():
            ratio = f" ({spent / reference.costs[cost]:.2f}x)" if reference.costs[cost] else ""
            line.append(f"{amount(spent)}{ratio}{' *' if name in optimal[cost] else ''}")
        lines.append(line)
    return titles, lines


def spell_row(row: SettingResult) -> str:
    """Format the metrics and costs of a setting on one line."""
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
    """Render the page of a comparison: a table, a plot (SVG) per cost, and each setting's changed options."""
    metric, part = compared.metric, macros()
    note = part.note(
        f"All settings answered the same {compared.prompts} prompts. Intervals are bootstrap intervals over "
        f"prompts, paired for the differences. * No other setting has a better {metric} for no more of this "
        "cost."
    )
    key = part.note(
        f"Filled and joined: no other setting has a better {metric} for no more of this cost. Hollow: "
        "another one has. Vertical lines: intervals."
    )
    figures = [
        part.figure(f"{metric} against {cost}", Markup(plot))
        for cost, plot in zip(compared.costs, plots, strict=True)
    ]
    changes = [[name, json.dumps(as_plain(row.changes))] for name, row in compared.rows.items()]
    sections = [
        ("costs", f"{metric} and costs", part.grid(figures) + key),
        ("changes", "Changes of each setting", table(["setting", "changes"], changes, kind="value")),
    ]
    return document(title, [table(*cells(compared))], sections, heading="Settings", subtitle=note)


def draw(compared: SettingsComparison, costs: Sequence[str]) -> str:
    """Plot the metric against costs as SVG, a panel per cost, with one legend below the panels."""
    from matplotlib.figure import Figure

    names = [name for name, row in compared.rows.items() if math.isfinite(row.quality[compared.metric][0])]
    labels = [textwrap.fill(name, 54) for name in names]
    legend = LEGEND * sum(1 + label.count("\n") for label in labels)
    width, height = WIDTH * len(costs), HEIGHT + legend
    size = ((WIDTH - LEFT - RIGHT) / width, (HEIGHT - TOP - BOTTOM) / height)
    with chart_style(salt=repr((costs, compared))):
        figure = Figure((width / 72, height / 72), dpi=72)
        for i, cost in enumerate(costs):
            axes = figure.add_axes(((i * WIDTH + LEFT) / width, (BOTTOM + legend) / height, *size))
            points = draw_panel(axes, compared, cost, names)
        figure.legend(points, labels, loc="lower left", frameon=False, borderpad=0, borderaxespad=0.3)
        return svg_of(figure)


def draw_panel(axes: Axes, compared: SettingsComparison, cost: str, names: Sequence[str]) -> list[Any]:
    """Plot the metric of settings against one cost; the Pareto front is filled and joined by a line."""
    best = compared.optimal(cost)
    rows = {name: compared.rows[name] for name in names}
    at = {name: (row.costs[cost], row.quality[compared.metric][0]) for name, row in rows.items()}
    axes.plot(*zip(*(at[name] for name in best), strict=True), color="#b8c4d0", linewidth=1.4)
    points = []
    for i, (name, row) in enumerate(rows.items()):
        (x, y), (_, low, high) = at[name], row.quality[compared.metric]
        colour, on_front = style_of(i)[0], name in best
        # Hollow markers are larger, to stay visible around a filled marker at the same point.
        style = {"markerfacecolor": colour if on_front else "#ffffff", "markersize": 5.5 if on_front else 8.0}
        # Error bars must not be negative, but a bootstrap interval can lie on one side of the value.
        lengths = [[max(0.0, y - low)], [max(0.0, high - y)]]
        marker = "os^D"[i // 8 % 4]
        points.append(
            axes.errorbar(
                x, y, lengths, fmt=marker, color=colour, zorder=2 + on_front, elinewidth=0.8, **style
            )
        )
    axes.set(xlabel=f"{cost} per prompt", ylabel=compared.metric)
    if rows:
        set_axes(axes, [x for x, _ in at.values()])
        axes.yaxis.set_label_coords((14 - LEFT) / (WIDTH - LEFT - RIGHT), 0.5)
    return points


def set_axes(axes: Axes, amounts: Sequence[float]) -> None:
    """Set a linear or logarithmic cost axis, and the positions and number format of ticks."""
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
