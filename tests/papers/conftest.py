"""Tiny checkpoints and policies, as the tests of vision-language models have them."""

from tests.vision.conftest import checkpoint, exact

__all__ = ["checkpoint", "exact"]
