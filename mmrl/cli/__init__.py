"""The command line: every file of this package holds commands.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 stopped by the keyboard.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mmrl import __version__
from mmrl.cli.command import COMMANDS, one_line
from mmrl.config.loading import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = parser().parse_args(arguments)
    # `python -m mmrl` finds modules in the working directory, so the console script must as well.
    sys.path.append(str(Path.cwd()))
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        return given.command(given) or 0
    except ConfigError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left: `mmrl list | head`
        sys.stderr.close()
        return 0
    except (ValueError, RuntimeError, OSError, ArithmeticError, ImportError) as error:
        logging.getLogger("mmrl").debug("", exc_info=True)
        print(f"failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        if given.traceback:
            raise
        return 1


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; the first call imports the files that define them."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    top = argparse.ArgumentParser(prog="mmrl", description="Train and measure multimodal models with RL.")
    top.add_argument("--traceback", action="store_true", help="show where a failure came from")
    top.add_argument("--version", action="version", version=f"mmrl {__version__}")
    groups = {"": top.add_subparsers(required=True, metavar="command")}
    for command in sorted(COMMANDS, key=lambda command: command.order):
        group, _, name = command.name.rpartition(" ")
        if group not in groups:  # of commands of two words: `mmrl data check`
            inner = groups[""].add_parser(group, help=f"Commands about {group}.")
            groups[group] = inner.add_subparsers(required=True, metavar="command")
        command.add_to(groups[group], name)
    return top
