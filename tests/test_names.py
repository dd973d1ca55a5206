"""Every name that a file imports from the project exists, inside functions too: nothing runs them all."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

from tests.support.rules import rule

ROOT = Path(__file__).parents[1]
FOLDERS = ("mmrl", "vision", "diffusion", "compression", "examples", "benchmarks", "docs", "tests")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


@rule(FILES, lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.partition(".")[0] in ("mmrl", "examples", "benchmarks", "tests"):
            loaded = importlib.import_module(module)
            for alias in node.names:
                if not hasattr(loaded, alias.name) and not is_module(f"{module}.{alias.name}"):
                    yield f"line {node.lineno}: {module} has no '{alias.name}'; import it from its new place"


def is_module(name: str) -> bool:
    """Whether a module has this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is no package
        return False
