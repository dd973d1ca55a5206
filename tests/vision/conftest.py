"""Tiny checkpoints and policies that all tests of vision-language models share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import transformers

from mmrl.vision.policies.tokens import Tokens
from tests.vision import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Find the checkpoint of a family; nobody writes to it."""
    transformers.utils.logging.disable_progress_bar()
    return cache(lambda family: tiny.make(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def copied(checkpoint) -> Callable[..., Tokens]:
    """Copy a policy in float32, which takes less than loading it; a test may change its copy."""
    load = cache(lambda family, **options: Tokens(model=str(checkpoint(family)), dtype="float32", **options))
    return lambda family, **options: copy.deepcopy(load(family, **options))


@pytest.fixture(scope="session")
def exact(checkpoint) -> Callable[..., Tokens]:
    """Load a policy in float64, once for all tests; nobody changes its weights."""
    return cache(lambda family, **options: Tokens(model=str(checkpoint(family)), dtype="float64", **options))
