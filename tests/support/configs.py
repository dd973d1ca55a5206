"""Where the configuration files are."""

from __future__ import annotations

from pathlib import Path

from mmrl.config.registry import SCOPES, Entry, pieces

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
METHODS = sorted((CONFIGS / "methods").rglob("*.yaml"))


def method_file(name: str) -> Path:
    """Find the file of a method by its name."""
    return next(path for path in METHODS if path.stem == name)


def library_pieces(kind: str) -> list[Entry]:
    """List the pieces of the library; those of examples that a test imported are left out."""
    return [entry for entry in pieces(kind) if entry.scope in SCOPES]
