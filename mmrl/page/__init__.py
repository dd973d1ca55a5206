"""One self-contained HTML page of a run, or of several side by side: what was measured, how it went, and
pictures of what models did."""

from mmrl.page.compare import write_comparison
from mmrl.page.curves import curves
from mmrl.page.parts import document, metric_table
from mmrl.page.reading import find_run
from mmrl.page.run_page import write_page

__all__ = ["curves", "document", "find_run", "metric_table", "write_comparison", "write_page"]
