"""Console output of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

SILENCE = 30.0  # seconds without output after which progress inside a step is printed
PAUSE = 5.0  # minimum seconds between plain lines
SHOWN = [
    "reward", "reward_std", "rewards/margins", "rewards/accuracies", "kl", "entropy",
    "completions/mean_length", "loss", "grad_norm", "updates", "step_time",
]  # fmt: skip
TABLE = [*SHOWN[:-1], "clip_ratio/region_mean", "time/rollouts_per_second", "step_time"]
WARNINGS = 3  # number of warnings below the table


class Console:
    """Console output of a run: a live table on a terminal, plain lines elsewhere.

    Args:
        title: Name of the run.
        max_steps: Number of steps of the run.
        quiet: Print nothing, as on processes other than the main one.
    """

    def __init__(self, title: str, max_steps: int, quiet: bool = False) -> None:
        self.title, self.max_steps, self.quiet = title, max_steps, quiet
        self.live, self.printed = None, -math.inf  # rich's live display; time of the last line about a step
        self.first: Mapping[str, float] = {}
        self.last: Mapping[str, float] = {}
        self.warnings: list[str] = []
        self.working, self.spoke = "", time.monotonic()  # progress inside the step; time of the last line

    def begin(self, step: int, first: Mapping[str, float] | None = None) -> None:
        """Start the display at a step. For a resumed run, `first` has the metrics of its very first step."""
        self.first = first or {}
        if self.quiet or not on_terminal():
            return
        from rich import progress
        from rich.live import Live

        self.progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(self.title, total=self.max_steps, completed=step)
        self.live = Live(get_renderable=self.panel, refresh_per_second=4)
        self.live.start()
        atexit.register(self.end)  # restores the terminal's cursor if the run fails

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step."""
        self.first, self.last, self.working = self.first or dict(metrics), metrics, ""
        if self.live is not None:
            self.progress.update(self.task, completed=step + 1)
        elif not self.quiet and (time.monotonic() > self.printed + PAUSE or step + 1 == self.max_steps):
            self.printed = time.monotonic()
            values = "  ".join(f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics)
            left = (self.max_steps - step - 1) * metrics.get("step_time", 0.0)
            self.say(f"{self.title} {step + 1}/{self.max_steps}  {values}  eta {left:.0f} s")

    def work(self, work: str, done: int, total: int) -> None:
        """Show progress inside a step: below the progress bar, or as a printed line after 30 s of silence."""
        self.working = f"{work} {done}/{total}"
        if self.live is None and time.monotonic() > self.spoke + SILENCE:
            self.say(f"{self.title}: {self.working}")

    def panel(self) -> Group:
        """Return the live display: progress bar, table of last and first metric values, and last warnings."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("metric", box=None, pad_edge=False)
        for title in ("last", "first", "change"):
            table.add_column(title, justify="right")
        for name in (name for name in TABLE if name in self.last):
            last, first = self.last[name], self.first.get(name, math.nan)
            cells = (format(value, ".3g") if math.isfinite(value) else "-" for value in (last, first))
            table.add_row(name, *cells, f"{last - first:+.3g}" if math.isfinite(last - first) else "-")
        texts = self.warnings[-WARNINGS:]
        if len(self.warnings) > len(texts):
            texts.append(f"and {len(self.warnings) - len(texts)} before")
        warnings = [Text(f"! {text}", style="yellow") for text in texts]
        working = [Text(self.working, style="dim")] if self.working else []
        return Group(self.progress, *working, *([table] if table.row_count else []), *warnings)

    def warn(self, text: str) -> None:
        """Print a warning, and show it below the live table of metrics."""
        self.warnings.append(text)
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """Print a line without breaking the live table of metrics."""
        if self.live is not None:
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif not self.quiet:
            self.spoke = time.monotonic()
            print(text, flush=True)

    def end(self) -> None:
        """Stop the live table and restore the terminal."""
        if self.live is not None:
            self.live.stop()
            self.live = None


class ProgressLines:
    """Progress of a command on standard error: a line every 5 s, or every 30 s without a terminal."""

    def __init__(self) -> None:
        self.spoke = time.monotonic()
        self.quiet = os.environ.get("RANK", "0") != "0"  # only the first process prints

    def __call__(self, work: str, done: int, total: int) -> None:
        """Print progress, unless the last line was printed less than 5 s ago (30 s without a terminal)."""
        now = time.monotonic()
        if not self.quiet and now > self.spoke + (PAUSE if sys.stderr.isatty() else SILENCE):
            self.spoke = now
            print(f"{work} {done}/{total}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether the standard output is a terminal."""
    return sys.stdout.isatty()
