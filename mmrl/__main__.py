"""The command line: train, evaluate, build, check, list, env. Exit codes: 0 done, 1 failed, 2 wrong usage or
configuration."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mmrl.config import BuildConfig, Config, ConfigError, EvaluateConfig, Evaluation, load, parse_some, read

PACKAGES = (
    "mmrl", "torch", "torchvision", "transformers", "accelerate", "peft", "datasets", "av", "diffusers",
    "open_clip_torch", "timm", "bitsandbytes", "tensorboard",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    given = _parser().parse_args(arguments)
    # `python -m mmrl` finds modules in the working directory, so the console script must as well.
    sys.path.append(str(Path.cwd()))
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return given.command(given) or 0
    except ConfigError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
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
    for name, command, words in (
        ("train", train, "train as a configuration says; goes on where the last checkpoint stands"),
        ("evaluate", evaluate, "measure a model on held-out prompts"),
        ("build", build, "build a data set or a model folder"),
    ):
        one = commands.add_parser(name, help=words)
        one.add_argument("config", help="a YAML file, or one that comes with mmrl")
        one.add_argument(
            "overrides", nargs="*", metavar="key=value", help="changes, dotted: learn.learning_rate=1e-6"
        )
        one.set_defaults(command=command)
    one = commands.add_parser("check", help="check configurations without loading anything")
    one.add_argument("configs", nargs="+")
    one.set_defaults(command=check)
    one = commands.add_parser("list", help="list pieces with their options")
    one.add_argument("kind", nargs="?", help="advantage, surrogate, reward, ...; all kinds if left out")
    one.set_defaults(command=show)
    one = commands.add_parser("env", help="print versions for a bug report")
    one.set_defaults(command=env)
    return parser


def train(given: argparse.Namespace) -> int:
    """Train, and leave everything in `output_dir`."""
    from mmrl.build import build as make
    from mmrl.train import train as go

    run = make(load(given.config, given.overrides, Config))
    go(run)
    if run.final is not None:
        _print_measured(run.final)
    return 0


def evaluate(given: argparse.Namespace) -> int:
    """Measure, print a table, and write `evaluation.json` and `evaluation.html` into `output_dir`."""
    from mmrl.build import load_evaluator
    from mmrl.page import document, metric_table

    kind = Config if "rollout" in read(given.config, given.overrides) else EvaluateConfig
    config = load(given.config, given.overrides, kind)
    measured = load_evaluator(config).measure()
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "metrics": dict(measured.metrics),
        "intervals": {k: list(v) for k, v in measured.intervals.items()},
    }
    (folder / "evaluation.json").write_text(json.dumps(written, indent=2))
    page = document(folder.name, ["<h1>Evaluation</h1>", metric_table({folder.name: measured})])
    (folder / "evaluation.html").write_text(page)
    _print_measured(measured)
    return 0


def build(given: argparse.Namespace) -> int:
    """Build what a configuration names, into its `output`."""
    from mmrl.bind import Pieces
    from mmrl.draws import Stream

    config = load(given.config, given.overrides, BuildConfig)
    built = Pieces(Stream(config.seed)).make("builder", config.build).build(Path(config.output))
    print(f"{config.output}: " + ", ".join(f"{name} {value}" for name, value in built.items()))
    return 0


def check(given: argparse.Namespace) -> int:
    """Check every file; print the reason of each that is wrong."""
    wrong = 0
    for path in given.configs:
        try:
            check_file(path)
            print(f"ok     {path}")
        except ConfigError as error:
            wrong += 1
            print(f"wrong  {path}: {_one_line(error)}")
    return 2 if wrong else 0


def check_file(path: str | Path) -> None:
    """Resolve every name and option of a file: a run, an evaluation, something to build, or a variant."""
    from mmrl import build as building
    from mmrl.bind import Pieces
    from mmrl.draws import Stream

    raw = read(path)
    if not raw:
        raise ConfigError("the file is empty")
    if "build" in raw:
        Pieces(Stream()).check("builder", load(path, kind=BuildConfig).build)
    elif "policy" not in raw:
        building.check_some(raw, parse_some(raw, Config))
    elif "rollout" in raw:
        building.check(load(path, kind=Config))
    else:
        config: EvaluateConfig = load(path, kind=EvaluateConfig)
        pieces = Pieces(Stream())
        pieces.check("policy", config.policy)
        evaluation: Evaluation = config.evaluation
        building.check_evaluation(evaluation, pieces)


def show(given: argparse.Namespace) -> int:
    """Print pieces: name, options with defaults, first sentence of the docstring."""
    from rich.console import Console
    from rich.table import Table

    from mmrl.registry import HOMES, pieces

    if given.kind is not None and given.kind not in HOMES:
        raise ConfigError(f"there is no kind '{given.kind}'; there are {', '.join(sorted(HOMES))}")
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for kind in [given.kind] if given.kind else sorted(HOMES):
        table = Table(
            "name", "options", "what it does", title=kind, title_justify="left", box=None, pad_edge=False
        )
        for entry in pieces(kind):
            options = ", ".join(_option(name, p) for name, p in entry.options.items() if name != "stream")
            table.add_row(entry.full_name, options, entry.summary)
        if table.row_count:
            console.print(table, "")
    return 0


def _option(name: str, parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return name
    return f"{name}={getattr(default, 'name', default)}"


def env(given: argparse.Namespace) -> int:
    """Print versions of everything that matters."""
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
    return 0


def _print_measured(measured) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "value", "interval")
    for name, value in measured.metrics.items():
        low, high = measured.intervals.get(name, (None, None))
        table.add_row(name, f"{value:.4g}", "" if low is None else f"{low:.4g} to {high:.4g}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
