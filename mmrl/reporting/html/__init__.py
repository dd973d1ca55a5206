"""Self-contained HTML pages of a run, an evaluation or a comparison, from jinja2 templates and matplotlib."""

from mmrl.reporting.html.compare import write_comparison
from mmrl.reporting.html.curves import curves
from mmrl.reporting.html.page import document, metric_table
from mmrl.reporting.html.run_folder import find_run
from mmrl.reporting.html.run_page import write_page

__all__ = ["curves", "document", "find_run", "metric_table", "write_comparison", "write_page"]
