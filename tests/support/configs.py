"""Where the configuration files are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.registry import SCOPES, Entry, Needs, find, pieces
from mmrl.config.schema import as_piece

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
METHODS = sorted((CONFIGS / "methods").rglob("*.yaml"))


def method_file(name: str) -> Path:
    """Find the file of a method by its name."""
    return next(path for path in METHODS if path.stem == name)


def reads_scores(variant: Mapping[str, Any]) -> bool:
    """Whether the objective of a method reads the scores of a reward model, so that this is the policy."""
    objective = as_piece(variant["objective"], "") if "objective" in variant else None
    needs = objective and getattr(find("objective", objective.name).target, "needs", None)
    return isinstance(needs, Needs) and "score" in needs.outputs


def library_pieces(kind: str) -> list[Entry]:
    """List the pieces of the library; those of examples that a test imported are left out."""
    return [entry for entry in pieces(kind) if entry.scope in SCOPES]
