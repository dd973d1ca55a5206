"""Every name that a file imports from the project exists, inside functions too: nothing runs them all."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("mmrl", "vision", "diffusion", "compression", "examples", "benchmarks", "docs", "tests")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imported_names_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.partition(".")[0] in ("mmrl", "examples", "benchmarks", "tests"):
            loaded = importlib.import_module(module)
            for alias in node.names:
                if not hasattr(loaded, alias.name):  # a module, or a name that is gone
                    importlib.import_module(f"{module}.{alias.name}")
