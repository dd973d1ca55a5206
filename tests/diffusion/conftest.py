"""Tiny pipelines that all tests of flow-matching models share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import diffusers
import pytest
import transformers

from tests.diffusion import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Find the folder of a tiny pipeline by its name in `tiny.MAKERS`; nobody writes to it."""
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tiny.MAKERS[name](folder)
        return folder

    return cache(make)


@pytest.fixture(scope="session")
def pipeline(checkpoint) -> Callable[[str], diffusers.DiffusionPipeline]:
    """Load a tiny pipeline, once for all tests; nobody changes its weights."""
    return cache(lambda name: tiny.load(checkpoint(name)))


@pytest.fixture
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the passes of networks out of estimates of memory: they take seconds."""
    monkeypatch.setattr("mmrl.diffusion.memory_estimates.extrapolated", lambda *given: 0.0)
