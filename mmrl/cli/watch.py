"""Command `mmrl watch`: serves the report page of a run while it trains."""

from __future__ import annotations

import argparse
import html
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from mmrl.cli.command import argument, command
from mmrl.config.loading import ConfigError
from mmrl.runtime.stages import begun, read_stages

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READ = ("metrics.jsonl", "warnings.jsonl", "evaluation.json", "config.yaml")  # files that the page shows


@command(
    argument("run", type=Path, metavar="RUN", help="the output_dir of a training run"),
    argument("--port", type=int, default=8765, help="0 takes a free one (default: 8765)"),
    argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)"),
    argument("--every", type=int, default=5, metavar="SECONDS", help="between refreshes (default: 5)"),
    examples=("mmrl watch runs/a", "mmrl watch runs/a --port 9000"),
)
def watch(given: argparse.Namespace) -> None:
    """Serve the report page of a run to a browser on this machine while the run trains; Ctrl-C ends it."""
    if not given.run.is_dir():
        raise ConfigError(f"there is no folder '{given.run}'; name the output_dir of a training run")
    if given.every < 1 or not 0 <= given.port < 2**16:
        raise ConfigError("--every wants at least 1 second, and --port a number from 0 to 65535")
    try:
        server = serve(given.run, given.host, given.port, given.every)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen at {given.host}:{given.port}: {reason}; take another --port"
        ) from error
    with server:
        print(f"http://{given.host}:{server.server_port}/ shows {given.run}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def serve(folder: Path, host: str, port: int, every: int) -> HTTPServer:
    """Create the HTTP server for the page of a run; it serves nothing else."""
    page = Page(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Refuse foreign host names: by DNS rebinding, a foreign web page could otherwise read this page.
            header = self.headers.get("Host", "")
            name = header.rpartition(":")[0].strip("[]") or header
            allowed = host not in LOOPBACK or name in LOOPBACK
            if self.path.partition("?")[0] != "/" or not allowed:
                self.send_error(404)
                return
            body = page.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if not page.finished:
                self.send_header("Refresh", str(every))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing; the base class prints a line per request."""

    return HTTPServer((host, port), Handler)


class Page:
    """The page of a run or of its stages, rendered again when a file of the run has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: Any = None  # times and sizes of the files at the last rendering
        self.made, self.finished = "", False

    def text(self) -> str:
        """Return the current page; before the first step or for unreadable files, a one-sentence page."""
        from mmrl.reporting.html.pages import comparison, run_page
        from mmrl.reporting.html.run_folder import read_run

        try:
            stages = read_stages(self.folder)
            folders = begun(self.folder) if stages else [self.folder]
            files = [path.stat() for folder in folders for name in READ if (path := folder / name).exists()]
            state = [(file.st_mtime_ns, file.st_size) for file in files]
            if state == self.shown:
                return self.made
            self.shown, runs = state, [run for run in map(read_run, folders) if run.records]
            if not runs:
                self.made = sentence(f"{self.folder.resolve().name} has not finished a step yet.")
            else:
                self.made = comparison(runs, stages=True) if stages else run_page(runs[0])
            last = runs[-1] if len(runs) == max(1, len(stages)) else None
            # A run that is limited by epochs has no `max_steps`.
            self.finished = last is not None and last.done >= (last.config.get("max_steps") or float("inf"))
        except (ValueError, OSError) as error:  # such as an incomplete file that is being written
            self.shown, self.made = None, sentence(f"The page cannot be made: {error}")
        return self.made


def sentence(text: str) -> str:
    """Return an HTML page with a single sentence."""
    return f"<!doctype html><meta charset=utf-8><title>mmrl</title><p>{html.escape(text)}"
