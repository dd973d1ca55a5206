"""A cluster of Ray with several nodes, each with processes of its own, on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MEMORY = 100 << 20  # bytes of the store of a node


@contextmanager
def nodes(count: int = 2, cpus: int = 2) -> Iterator[Any]:
    """Start nodes beside a head without cores, so that actors are on the nodes; `address` is for runs."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY},
    )
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=cpus, object_store_memory=MEMORY)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def node_of(process: int) -> int:
    """Return the process of the node that an actor's process belongs to."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
