"""Tiny checkpoints that caches and transforms are tested on: those of the vision-language models."""

from tests.vision.conftest import checkpoint, exact

__all__ = ["checkpoint", "exact"]
