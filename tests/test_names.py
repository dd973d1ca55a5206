"""Every import resolves, inside functions too: nothing runs them all."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path

from tests.support.rules import rule

ROOT = Path(__file__).parents[1]
FOLDERS = ("mmrl", "vision", "diffusion", "compression", "examples", "benchmarks", "docs", "tests")
OPTIONAL = "reportMissingImports"  # in a comment for the type checker: a package that tests do without
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


@rule(FILES, lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path):
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module]
        if not isinstance(node, ast.Import | ast.ImportFrom) or OPTIONAL in lines[node.lineno - 1]:
            continue
        if module.partition(".")[0] in ("mmrl", "examples", "benchmarks", "tests"):
            loaded = importlib.import_module(module)
            for alias in node.names:
                if not hasattr(loaded, alias.name) and not is_module(f"{module}.{alias.name}"):
                    yield f"line {node.lineno}: {module} has no '{alias.name}'; import it from its new place"
        else:
            for name in {*names} - {""}:
                if not is_module(name) and not (ROOT / "docs" / f"{name}.py").is_file():
                    yield f"line {node.lineno}: no module '{name}'; install it, or mark an extra '{OPTIONAL}'"


@cache
def is_module(name: str) -> bool:
    """Whether a module has this name."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the parent is no package, or has no spec
        return name in sys.modules
