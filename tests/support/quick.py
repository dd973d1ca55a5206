"""What makes runs quick where a test is about something else."""

from __future__ import annotations

import logging
import os
from functools import cache

import accelerate.optimizer
from _pytest.logging import catching_logs
from pytest import MonkeyPatch
from transformers import PreTrainedConfig

from mmrl.reporting.html import pages
from mmrl.reporting.html.curves import curves, time_split
from mmrl.training import evaluate

FUZZ = int(os.environ.get("MMRL_FUZZ", "100"))  # inputs of a fuzz test; `make test-all` draws 1,000
FEW = 50  # samples of a bootstrap, which takes longer than the rest of a toy's training


def draw_few() -> None:
    """Draw few samples for the intervals of evaluations, in all runs of this process."""
    evaluate.RESAMPLES = FEW


def draw_no_curves() -> None:
    """Draw nothing on the pages of runs, in this process: that takes longer than the steps of tiny models."""
    pages.curves, pages.time_split = lambda runs: [], lambda records: ""


def draw_curves(patch: MonkeyPatch) -> None:
    """Draw curves again, as long as the patch holds."""
    patch.setattr(pages, "curves", curves)
    patch.setattr(pages, "time_split", time_split)


def leave_unflushed() -> None:
    """Leave files of this process to the page cache: no test cuts the power, and the disk costs minutes."""
    os.fsync = lambda handle: None


def quicken_libraries() -> None:
    """Leave out what libraries do over and over."""
    # The optimizer of accelerate looks for this package on the disk at every step.
    accelerate.optimizer.is_lomo_available = cache(accelerate.optimizer.is_lomo_available)
    PreTrainedConfig.__repr__ = object.__repr__  # printed whenever one is read, for a log that is off
    # pytest adds handlers to every logger that does not propagate, six times a test; torch has 34 of them.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True
    catching_logs.__enter__ = _attach


@cache
def _own_loggers(number: int) -> list[logging.Logger]:
    """Return the loggers that do not propagate, when there are so many loggers."""
    loggers = logging.Logger.manager.loggerDict.values()
    return [one for one in loggers if isinstance(one, logging.Logger) and not one.propagate]


def _attach(catching: catching_logs) -> logging.Handler:
    """Attach a handler to the loggers that pytest attaches it to, without a look at all loggers each time."""
    root = logging.getLogger()
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    catching.attached_loggers = [root, *_own_loggers(len(logging.Logger.manager.loggerDict))]
    for logger in catching.attached_loggers:
        logger.addHandler(catching.handler)
    return catching.handler
