"""Cost metrics of an evaluation (`cost_metrics`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mmrl.config.loading import ConfigError
from mmrl.config.registry import cost
from mmrl.core.flop_counter import CountOperations
from mmrl.core.protocols import AsyncEngine, Engine


@cost
@contextmanager
def operations(engine: Engine) -> Iterator[Mapping[str, float]]:
    """Count the multiplications and additions of matrix products, convolutions and attention.

    Table look-ups (one-bit codes on a CPU) and Triton kernels are not counted. Raises `ConfigError` for
    engines that compute in other processes.
    """
    if isinstance(engine, AsyncEngine):
        raise ConfigError(
            "`cost_metrics: [operations]` counts what this process computes, but the engine computes in "
            "others; name an `evaluation.engine` without ray_workers and servers, or set `cost_metrics: []`"
        )
    spent: dict[str, float] = {}
    with CountOperations() as count:
        yield spent
    spent["operations"] = float(count.total.total())
