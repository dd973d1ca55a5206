"""The command line.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by the keyboard.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mmrl.config.loading import read
from mmrl.config.schema import BuildConfig, Config, ConfigError, EvaluateConfig, is_part, load, parse_some

PACKAGES = (
    "mmrl", "torch", "torchvision", "transformers", "accelerate", "peft", "datasets", "av", "diffusers",
    "open_clip_torch", "timm", "bitsandbytes", "tensorboard",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = _parser().parse_args(arguments)
    # `python -m mmrl` finds modules in the working directory, so the console script must as well.
    sys.path.append(str(Path.cwd()))
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return given.command(given) or 0
    except ConfigError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left: `mmrl list | head`
        sys.stderr.close()
        return 0
    except (ValueError, RuntimeError, OSError, ArithmeticError, ImportError) as error:
        logging.getLogger("mmrl").debug("", exc_info=True)
        print(f"failed: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        if given.traceback:
            raise
        return 1


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mmrl", description="Train and measure multimodal models with RL.")
    parser.add_argument("--traceback", action="store_true", help="show where a failure came from")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, command: Callable, among: Any = commands) -> argparse.ArgumentParser:
        added = among.add_parser(name, help=(inspect.getdoc(command) or "").partition("\n")[0])
        added.set_defaults(command=command)
        return added

    for command in (train, evaluate, doctor, estimate_memory, build):
        added = add(command.__name__.replace("_", "-"), command)
        added.add_argument("config", help="a YAML file, or one that comes with mmrl")
        changes = "changes, dotted: learn.learning_rate=1e-6"
        added.add_argument("overrides", nargs="*", metavar="key=value", help=changes)
    add("check", check).add_argument("configs", nargs="+")
    data = commands.add_parser("data", help="Look at data sets.")
    added = add("check", check_data, data.add_subparsers(required=True, metavar="command"))
    added.add_argument("path", help="a file of rows (jsonl, json, parquet), or a folder of them")
    home = "folder that media paths are relative to (default: the folder of the rows)"
    added.add_argument("--root", help=home)
    added.add_argument("--show", type=int, default=3, metavar="N", help="findings to print per check")
    added = add("report", report)
    added.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the output_dir of a training run")
    page = "the page to write (default: report.html of the one run, or comparison.html here)"
    added.add_argument("--output", type=Path, help=page)
    kinds = "advantage, surrogate, reward, ...; all kinds if left out"
    add("list", show).add_argument("kind", nargs="?", help=kinds)
    add("env", env)
    return parser


def train(given: argparse.Namespace) -> None:
    """Train into `output_dir`; continues from the last checkpoint."""
    from mmrl.build import build as make
    from mmrl.training.checkpointing import look
    from mmrl.training.loop import train as go

    config = load(given.config, given.overrides, Config)
    look(config)
    run = make(config)
    go(run)
    if run.final is not None and run.processes.main:
        _print_measured(run.final)


def doctor(given: argparse.Namespace) -> int:
    """Run every check of a training run on one small collection; exit code 1 if one finds something grave."""
    from mmrl.doctor import examine

    report = examine(load(given.config, given.overrides, Config))
    for entry, findings in report.found:
        verdict = "wrong" if any(finding.grave for finding in findings) else "ok   "
        print(f"{verdict}  {entry.full_name}: {entry.summary}")
        for finding in findings:
            advice = f"What to do: {finding.advice}" if finding.grave else finding.advice
            print(f"       {finding.what}.\n       {advice}.")
    _print_memory(report.memory, report.room, report.device)
    return 0 if report.healthy else 1


def estimate_memory(given: argparse.Namespace) -> int:
    """Estimate the memory of a training run by parts; exit code 1 if it is more than the device has."""
    from mmrl.diagnostics import memory_estimates

    memory = memory_estimates.estimate_memory(load(given.config, given.overrides, Config))
    room, device = memory_estimates.room()
    _print_memory(memory, room, device)
    print("without activations, which `mmrl doctor` measures")
    return int(0 < room < sum(memory.values()))


def _print_memory(memory: Mapping[str, float], room: float, device: str) -> None:
    for name, size in sorted(memory.items(), key=lambda item: -item[1]):
        print(f"{size / 1e9:10.3f} GB  {name}")
    print(f"{sum(memory.values()) / 1e9:10.3f} GB  of {room / 1e9:.3f} GB ({device})")


def evaluate(given: argparse.Namespace) -> None:
    """Measure one model or several `settings` of it; print a table and write it into `output_dir`."""
    from mmrl.build import load_evaluator
    from mmrl.pareto import compare
    from mmrl.reporting.html import document, metric_table
    from mmrl.reporting.metrics import write_measured
    from mmrl.reporting.pareto import show as show_settings

    trains = "rollout" in read(given.config, given.overrides)
    config = load(given.config, given.overrides, Config if trains else EvaluateConfig)
    folder = Path(config.output_dir)
    if not trains and config.settings:
        show_settings(compare(config, folder))
        return
    evaluator = load_evaluator(config)
    measured = evaluator.measure()
    if not evaluator.processes.main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_measured(folder, measured)
    page = document(folder.name, ["<h1>Evaluation</h1>", metric_table({folder.name: measured})])
    (folder / "evaluation.html").write_text(page)
    _print_measured(measured)
    for warning in measured.table.absent.values():
        print(f"warning: {warning}")


def build(given: argparse.Namespace) -> None:
    """Build a data set or a model folder into the `output` of a configuration."""
    from mmrl.config.binding import Pieces
    from mmrl.core.rng import Stream

    config = load(given.config, given.overrides, BuildConfig)
    pieces = Pieces(Stream(config.seed))
    pieces.check_all(config)
    pieces.require_packages()
    built = pieces.make_field(config, "build").build(Path(config.output))
    print(f"{config.output}: " + ", ".join(f"{name} {value}" for name, value in built.items()))


def check(given: argparse.Namespace) -> int:
    """Check configuration files without loading anything; print the error of each that is wrong."""
    code = 0
    for path in given.configs:
        try:
            check_file(path)
            print(f"ok     {path}")
        except ConfigError as error:
            code = 2
            print(f"wrong  {path}: {_one_line(error)}")
    return code


def check_file(path: str | Path) -> None:
    """Check every name and option of a file: a run, an evaluation, something to build, or a variant."""
    from mmrl.build import check as check_run
    from mmrl.config.binding import Pieces
    from mmrl.config.consistency import check_some
    from mmrl.core.rng import Stream
    from mmrl.pareto import check_settings

    raw = read(path)
    if not raw:
        raise ConfigError("the file is empty")
    if "build" in raw:
        Pieces(Stream()).check_all(load(path, kind=BuildConfig))
    elif is_part(raw):
        check_some(raw, parse_some(raw, Config))
    elif "rollout" in raw:
        check_run(load(path, kind=Config))
    else:
        check_settings(load(path, kind=EvaluateConfig))


def report(given: argparse.Namespace) -> None:
    """Write the page of a run, or one page that compares several."""
    from mmrl.reporting.html import find_run, write_comparison, write_page

    if len(given.runs) == 1:
        path = write_page(find_run(given.runs[0]).folder, given.output)
    else:
        path = write_comparison(given.runs, given.output or Path("comparison.html"))
    print(f"report: {path}")


def check_data(given: argparse.Namespace) -> int:
    """Find rows and media that are missing, broken or shared by splits; exit code 1 if there are any."""
    from mmrl.config.registry import pieces
    from mmrl.data.dataset_io import Rows, SourceError, row_files

    path = Path(given.path)
    root = Path(given.root or (path if path.is_dir() else path.parent))
    if given.root and not root.is_dir():
        raise ConfigError(f"there is no folder '{root}' that media paths could be relative to")
    row_files(path)
    rows = Rows(path, root)
    splits = Counter(row.split for row in rows)
    if not splits:
        raise SourceError(f"'{path}' holds no rows")
    by_check = [(entry, list(entry.target(rows))) for entry in pieces("check", on="data")]
    table = [[entry.full_name, str(len(findings)), entry.summary] for entry, findings in by_check]
    _print_table(["check", "found", "what it looks for"], *table)
    for entry, findings in by_check:
        for finding in findings[: given.show]:
            print(f"{entry.full_name}: {finding.place}: {finding.what}")
        if len(findings) > given.show:
            print(f"{entry.full_name}: and {len(findings) - given.show} more")
    wrong = sum(len(findings) for _, findings in by_check)
    counts = ", ".join(f"{split} {count}" for split, count in splits.items())
    print(f"{path}: {splits.total()} rows ({counts}), {wrong or 'nothing'} wrong")
    return int(wrong > 0)


def show(given: argparse.Namespace) -> None:
    """List pieces with their options and defaults."""
    from mmrl.config.registry import HOMES, pieces

    if given.kind is not None and given.kind not in HOMES:
        raise ConfigError(f"there is no kind '{given.kind}'; there are {', '.join(sorted(HOMES))}")
    for kind in [given.kind] if given.kind else sorted(HOMES):
        rows = []
        for entry in pieces(kind):
            options = []
            for name, default in ((name, p.default) for name, p in entry.options.items() if name != "stream"):
                # A default that is a piece is shown by its name.
                shown = f"={getattr(default, 'name', default)}"
                options.append(name if default is inspect.Parameter.empty else name + shown)
            rows.append([entry.full_name, entry.on, ", ".join(options), entry.summary])
        table = [["name", "runs on", "options", "what it does"], *rows]
        if not any(row[1] for row in rows):  # a kind without stages
            table = [[name, *rest] for name, _, *rest in table]
        if rows:
            _print_table(*table, title=kind)
            print()


def env(given: argparse.Namespace) -> None:
    """Print versions for a bug report."""
    import platform

    import torch

    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices: {', '.join(devices) or f'cpu, {torch.get_num_threads()} threads'}")


def _print_measured(measured: Any) -> None:
    spelled = {name: f"{low:.4g} to {high:.4g}" for name, (low, high) in measured.intervals.items()}
    rows = [[name, f"{value:.4g}", spelled.get(name, "")] for name, value in measured.metrics.items()]
    _print_table(["metric", "value", "interval"], *rows)


def _print_table(titles: Sequence[str], *rows: Sequence[str], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    (Console() if sys.stdout.isatty() else Console(width=200)).print(table)
