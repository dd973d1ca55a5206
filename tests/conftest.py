"""Randomness for tests: a generator of their own, never the global seed."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def generator() -> torch.Generator:
    """Give a generator that draws the same numbers every time."""
    return torch.Generator().manual_seed(0)
