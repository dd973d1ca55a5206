"""A cluster of Ray on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

TRIES = 4  # Ray gives a node half a minute to start, which a machine with other work may take longer for


@contextmanager
def local_cluster(cpus: int = 12) -> Iterator[None]:
    """Start a cluster, and shut it down at the end."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for left in reversed(range(TRIES)):
        try:
            ray.init(
                num_cpus=cpus, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20
            )
            break
        except Exception as error:  # Ray raises nothing narrower
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
    try:
        yield
    finally:
        ray.shutdown()
