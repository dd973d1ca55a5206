# PYTHON_ARGCOMPLETE_OK
"""The command line `mmrl`: each module of this package defines commands.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 130 keyboard interrupt.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmrl import __version__
from mmrl.cli import completion
from mmrl.cli.command import COMMANDS, one_line
from mmrl.config.loading import ConfigError, expanded, nearest
from mmrl.core.progress import showing
from mmrl.reporting.console import ProgressLines

PROSE = {"prompt", "message", "overrides"}  # arguments that are not paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    commands = parser()
    completion.complete(commands)
    given, late = commands.parse_known_args(arguments)
    # argparse ends a list of files or overrides at the first flag; append those that come after a flag.
    place = next((name for name in ("configs", "overrides") if hasattr(given, name)), "")
    if late and (not place or any(text.startswith("-") for text in late)):
        commands.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        setattr(given, place, [*getattr(given, place), *late])
    # Make modules of the working directory importable, as `python -m mmrl` does.
    sys.path.append(str(Path.cwd()))
    quiet_progress_bars()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        _expand_paths(given)
        with showing(ProgressLines()):
            return given.command(given) or 0
    except ConfigError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reading program ended, as in `mmrl list | head`
        sys.stderr.close()
        return 0
    except (ValueError, RuntimeError, OSError, ArithmeticError, ImportError) as error:
        logging.getLogger("mmrl").debug("", exc_info=True)
        print(f"failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        if given.traceback:
            raise
        return 1


def _expand_paths(given: argparse.Namespace) -> None:
    """Expand `~` and `$NAME` in path arguments, which shells do not expand in quotes or after `=`."""

    def expand(value: Any) -> Any:
        if isinstance(value, list):
            return [expand(one) for one in value]
        return type(value)(expanded(str(value))) if isinstance(value, str | Path) else value

    for name in vars(given).keys() - PROSE:
        setattr(given, name, expand(getattr(given, name)))


class Parser(argparse.ArgumentParser):
    """Argument parser that prints an error on one line, followed by the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        chosen = re.search(r"argument command: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if chosen:
            names = [name.strip("'") for name in chosen[2].split(", ")]
            hint = nearest(chosen[1], names) or f"there are {', '.join(names)}"
            message = f"there is no command '{chosen[1]}'; {hint}"
        usage = " ".join(self.format_usage().split())
        self.exit(2, f"error: {message}; {usage}; `{self.prog} --help` says more\n")


def quiet_progress_bars() -> None:
    """Turn off progress bars of libraries if stderr is not a terminal, to keep log files short.

    This sets the variables that tqdm, huggingface_hub and datasets read on import, unless already set.
    """
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def parser() -> argparse.ArgumentParser:
    """Import every module that defines commands, and return the parser of all commands."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    top = Parser(prog="mmrl", description="Train and measure multimodal models with RL.")
    top.add_argument("--traceback", action="store_true", help="show where a failure came from")
    top.add_argument("--version", action="version", version=f"mmrl {__version__}")
    groups = {"": top.add_subparsers(required=True, metavar="command")}
    for command in sorted(COMMANDS, key=lambda command: command.order):
        group, _, name = command.name.rpartition(" ")
        if group not in groups:  # first word of a command such as `mmrl data check`
            inner = groups[""].add_parser(group, help=f"Commands about {group}.")
            groups[group] = inner.add_subparsers(required=True, metavar="command")
        command.add_to(groups[group], name)
    return top
