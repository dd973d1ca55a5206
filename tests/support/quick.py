"""What makes runs quick where a test is about something else."""

from __future__ import annotations

import os

from mmrl.training import evaluate

FUZZ = int(os.environ.get("MMRL_FUZZ", "100"))  # inputs of a fuzz test; `make test-all` draws 1,000
FEW = 50  # samples of a bootstrap, which takes longer than the rest of a toy's training


def draw_few() -> None:
    """Draw few samples for the intervals of evaluations, in all runs of this process."""
    evaluate.RESAMPLES = FEW


def leave_unflushed() -> None:
    """Leave files of this process to the page cache: no test cuts the power, and the disk costs minutes."""
    os.fsync = lambda handle: None
