"""Index of the pieces in `mmrl/papers`, parsed from source, so that a run imports only what it uses."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "papers"
# Matches a decorator, possibly of several lines, and the function or class below it.
DEFINED = re.compile(r"^((?:@.*\n(?:[ )].*\n)*)+)(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def snake_case(name: str) -> str:
    """Convert the name of a function or class to a piece name: `WithHints` becomes `with_hints`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@cache
def defined() -> dict[str, frozenset[tuple[str, str]]]:
    """Map the module of every paper to the (kind, name) pairs of the pieces that it defines."""
    return {
        f"mmrl.papers.{path.stem}": frozenset(definitions(path.read_text(encoding="utf-8")))
        for path in sorted(FOLDER.glob("*.py"))
        if path.stem != "__init__"
    }


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (decorator, piece name) for each decorated function and class in a Python source text."""
    for decorators, name in DEFINED.findall(source):
        for decorator in re.findall(r"^@(\w+)", decorators, re.MULTILINE):
            yield decorator, snake_case(name)


def import_papers(kind: str, name: str = "") -> None:
    """Import the papers that define the named piece of a kind; without a name, any piece of the kind."""
    short = name.rpartition(".")[2]
    for module, pieces in defined().items():
        if (kind, short) in pieces or not name and any(kind == defines for defines, _ in pieces):
            importlib.import_module(module)
