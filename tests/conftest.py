"""What all tests share: a generator of their own, never the global seed, and the same matrix library."""

from __future__ import annotations

import pytest
import torch

from mmrl.core import onednn


@pytest.fixture
def generator() -> torch.Generator:
    """Give a generator that draws the same numbers every time."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave files of tests to the page cache: no test cuts the power, and the disk costs minutes."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def onednn_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on processors where it is slower as well, so that its code is tested there."""
    monkeypatch.setattr(onednn, "FASTER", True)
