"""The processor under a benchmark: its name, and its peak rate of matrix products by MKL and by oneDNN.

    python -m benchmarks.machine [--threads 1]

A ratio of two programs that go through different libraries says as much about the processor as about the
programs: on some, oneDNN is twice as fast as MKL, on others hardly faster.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cache
from pathlib import Path

import torch

SIDE = 1024  # of the square float32 matrices
SECONDS = 0.5  # that each library computes


def processor() -> str:
    """Read the name of the processor."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def rate(multiply) -> float:
    """Measure the best rate of a product of two square matrices, in GFLOP/s; an addition counts as well."""
    multiply()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.process_time()
        multiply()
        best = min(best, time.process_time() - start)
    return 2 * SIDE**3 / best / 1e9


@cache
def describe() -> dict[str, float | str]:
    """Name the processor, and measure its peak by both libraries with the threads that torch has now."""
    x, weight = torch.randn(2, SIDE, SIDE)
    found: dict[str, float | str] = {"processor": processor(), "threads": torch.get_num_threads()}
    found["mkl_gflops"] = round(rate(lambda: torch.nn.functional.linear(x, weight)), 1)
    if torch.backends.mkldnn.is_available():
        product = torch.ops.mkldnn._linear_pointwise
        found["onednn_gflops"] = round(rate(lambda: product(x, weight, None, "none", [], "")), 1)
    return found


def share_of_peak(operations: float, seconds: float) -> float:
    """Give the share of the faster library's peak that a computation reached."""
    peak = max(float(value) for name, value in describe().items() if name.endswith("_gflops"))
    return operations / seconds / peak / 1e9


def main() -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(json.dumps(describe()))


if __name__ == "__main__":
    main()
