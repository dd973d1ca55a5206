"""Results of several settings of a model: Pareto front, table, plot and page of quality against costs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mmrl.config.schema import as_plain
from mmrl.reporting.html import document
from mmrl.reporting.html.charts import chart_style, svg_of
from mmrl.reporting.html.layout import macros, table

Estimate = tuple[float, float, float]  # a value and the ends of its interval

MARKS = "os^Dv"  # of every next ten settings


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
        for cost, amount in row.costs.items():
            ratio = f" ({amount / reference.costs[cost]:.2f}x)" if reference.costs[cost] else ""
            line.append(f"{amount:.3g}{ratio}{' *' if name in optimal[cost] else ''}")
        lines.append(line)
    return titles, lines


def spell_row(row: SettingResult) -> str:
    """Write the metrics and costs of a setting in one line."""
    metrics = [f"{metric} {estimate[0]:.4g}" for metric, estimate in row.quality.items()]
    return "  ".join([*metrics, *(f"{cost} {amount:.3g}" for cost, amount in row.costs.items())])


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


def page(title: str, compared: SettingsComparison, plot: str) -> str:
    """Build the page of a comparison from its table, the plot (SVG) and the settings' changes."""
    note = macros().note(
        f"All answered the same {compared.prompts} prompts. Intervals are of prompts drawn anew, the same "
        "for all settings, so differences are of pairs. * No other setting has a better "
        f"{compared.metric} for no more of this cost."
    )
    changes = [[name, json.dumps(as_plain(row.changes))] for name, row in compared.rows.items()]
    sections = [
        ("costs", f"{compared.metric} and costs", Markup("<figure>{}</figure>").format(Markup(plot))),
        ("changes", "What they change", table(["setting", "changes"], changes, kind="value")),
    ]
    return document(title, [table(*cells(compared))], sections, heading="Settings", subtitle=note)


@chart_style()
def draw(compared: SettingsComparison) -> str:
    """Plot the metric against every cost as SVG; settings on the Pareto front are filled and joined."""
    from matplotlib.figure import Figure

    costs, rows = compared.costs, compared.rows
    figure = Figure((max(6.0, 3.6 * len(costs)), 3.4 + 0.06 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        best = compared.optimal(cost)
        points = [(rows[name].costs[cost], rows[name].quality[compared.metric][0]) for name in best]
        axes.plot([x for x, _ in points], [y for _, y in points], color="#b8c4d0", linewidth=1.4)
        for number, (name, row) in enumerate(rows.items()):
            middle, low, high = row.quality[compared.metric]
            axes.errorbar(
                row.costs[cost],
                middle,
                # Resampled ends may lie on one side of the value; matplotlib wants lengths of 0 or more.
                [[max(0.0, middle - low)], [max(0.0, high - middle)]],
                fmt=MARKS[number // 10 % len(MARKS)],
                color=f"C{number % 10}",
                elinewidth=0.7,
                fillstyle="full" if name in best else "none",
                label=name,
            )
        amounts = [row.costs[cost] for row in rows.values()]
        if min(amounts) > 0 and max(amounts) > 10 * min(amounts):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        axes.set_xlabel(f"{cost} per prompt")
        axes.margins(x=0.1, y=0.1)
    panels[0].set_ylabel(compared.metric)
    marks, names = panels[0].get_legend_handles_labels()
    figure.legend(marks, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    return svg_of(figure)
