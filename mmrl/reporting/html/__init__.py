"""Self-contained HTML pages of runs, evaluations and comparisons, made with jinja2 and matplotlib."""

from mmrl.reporting.html.curves import curves
from mmrl.reporting.html.layout import document, macros, metric_table
from mmrl.reporting.html.pages import write_comparison, write_page
from mmrl.reporting.html.predictions import write_compared_page, write_predictions_page
from mmrl.reporting.html.run_folder import find_run

__all__ = [
    "curves",
    "document",
    "find_run",
    "macros",
    "metric_table",
    "write_compared_page",
    "write_comparison",
    "write_page",
    "write_predictions_page",
]
