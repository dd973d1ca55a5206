"""Where the configuration files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
METHODS = sorted((CONFIGS / "methods").rglob("*.yaml"))


def method_file(name: str) -> Path:
    """Find the file of a method by its name."""
    return next(path for path in METHODS if path.stem == name)
