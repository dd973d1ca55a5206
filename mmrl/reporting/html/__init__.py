"""Self-contained HTML pages of a run, an evaluation or a comparison, from jinja2 templates and matplotlib."""

from mmrl.reporting.html.curves import curves
from mmrl.reporting.html.layout import document, metric_table
from mmrl.reporting.html.pages import write_comparison, write_page
from mmrl.reporting.html.run_folder import find_run

__all__ = ["curves", "document", "find_run", "metric_table", "write_comparison", "write_page"]
