"""One self-contained HTML page of a run, or of several side by side: what was measured, how it went, and
pictures of what models did."""

from mmrl.reporting.html.compare import write_comparison
from mmrl.reporting.html.curves import curves
from mmrl.reporting.html.parts import document, metric_table
from mmrl.reporting.html.reading import find_run
from mmrl.reporting.html.run_page import write_page

__all__ = ["curves", "document", "find_run", "metric_table", "write_comparison", "write_page"]
