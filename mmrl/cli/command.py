"""Declaration of commands as functions, with their arguments and examples for the command line."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.cli import completion
from mmrl.cli.completion import Completer

# First commands in `mmrl --help`, in this order; all other commands come after them.
FIRST = ("train", "evaluate", "generate", "chat", "check", "doctor", "estimate-memory", "report", "build")
COMMANDS: list[Command] = []

Function = Callable[[argparse.Namespace], int | None]


@dataclass(frozen=True)
class Argument:
    """Parameters for `ArgumentParser.add_argument`, and a function that completes values in shells."""

    names: tuple[str, ...]
    options: dict[str, Any]
    completer: Completer | None = None


@dataclass(frozen=True)
class Command:
    """A command of `mmrl`: a name of one or two words, its function, arguments and examples."""

    name: str
    function: Function
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]

    @property
    def order(self) -> tuple[int, str]:
        """Sort key of the command in `mmrl --help`."""
        return FIRST.index(self.name) if self.name in FIRST else len(FIRST), self.name

    def add_to(self, commands: Any, name: str) -> None:
        """Add the command as `name` to `commands`, the sub-commands of a parser."""
        text = inspect.getdoc(self.function) or ""
        examples = "".join(f"\n  {example}" for example in self.examples)
        added = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            epilog=f"examples:{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for argument in self.arguments:
            action = added.add_argument(*argument.names, **argument.options)
            if argument.completer:
                action.completer = argument.completer  # read by argcomplete
        added.set_defaults(command=self.function)


def argument(*names: str, completer: Completer | None = None, **options: Any) -> Argument:
    """Declare an argument: parameters of `ArgumentParser.add_argument`, and a completer for shells."""
    return Argument(names, options, completer)


def command(
    *arguments: Argument, name: str = "", examples: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Register a function as a command; its docstring is the help text.

    Args:
        arguments: Arguments of the command.
        name: Name of one or two words; by default the function's name with hyphens.
        examples: Command lines shown by `--help`.
    """

    def register(function: Function) -> Function:
        spelled = name or function.__name__.replace("_", "-")
        COMMANDS.append(Command(spelled, function, arguments, tuple(examples)))
        return function

    return register


CONFIG = argument("config", help="a YAML file, or one that comes with mmrl", completer=completion.configs)
OVERRIDES = argument(
    "overrides",
    nargs="*",
    default=(),  # otherwise argparse calls the argument required
    metavar="key=value",
    help="changes, dotted: learn.learning_rate=1e-6",
    completer=completion.overrides,
)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into files and overrides: `key=value` is an override unless such a file exists."""
    files = [text for text in arguments if "=" not in text or Path(text).is_file()]
    return files, [text for text in arguments if text not in files]


def one_line(error: Exception) -> str:
    """Return the message of an error as one line without control characters."""
    return printable(" ".join(line.strip() for line in str(error).splitlines()))


def for_terminal(text: str) -> str:
    """Replace control characters in the output of a model if stdout is a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def printable(text: str) -> str:
    """Replace all unprintable characters except line breaks and tabs by U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_table(titles: Sequence[str], *rows: Sequence[str], title: str | None = None) -> None:
    """Print a table, up to 200 characters wide if stdout is not a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*titles, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # Disable markup of rich, which would parse `[mean]` in a cell as a style.
    Console(markup=False, width=None if sys.stdout.isatty() else 200).print(table)


def print_measured(measured: Any) -> None:
    """Print the metrics of an evaluation with their confidence intervals."""
    spelled = {name: f"{low:.4g} to {high:.4g}" for name, (low, high) in measured.intervals.items()}
    rows = [[name, f"{value:.4g}", spelled.get(name, "")] for name, value in measured.metrics.items()]
    print_table(["metric", "value", "interval"], *rows)
