"""Processes with one core each that end with the process that made them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def workers(jobs: int) -> Executor:
    """Return processes with a core each: small models gain nothing from two threads; 1: this process."""
    # A fork would inherit threads of torch.
    return ProcessPoolExecutor(jobs, get_context("spawn"), _begin) if jobs > 1 else Here()


def each_seed(one_seed: Callable[[int], Result], seeds: Sequence[int], jobs: int) -> dict[int, Result]:
    """Call a function for every seed, `jobs` at the same time; return the results by seed."""
    with workers(min(jobs, len(seeds))) as pool:
        return dict(zip(seeds, pool.map(one_seed, seeds), strict=True))


class Here(Executor):
    """Calls at once, in this process."""

    def submit(self, call: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        """Call, and return the result as a future."""
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **options))
        return done


def _begin() -> None:
    """Compute with one thread in this process, and end when its parent has ended, killed or not."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
