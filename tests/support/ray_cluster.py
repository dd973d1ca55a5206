"""Clusters of Ray on this machine, for tests, and a run on one that is killed; workers are forked.

`python tests/support/ray_cluster.py FOLDER STEP CHANGES` trains a toy run, with its changes in JSON, and ends
itself by SIGKILL at the end of a step, while the workers make the rollouts of the next one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import ray_forks

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
TRIES = 4  # Ray gives a node half a minute to start, which a machine with other work may take longer for
OPTIONS = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "object_store_memory": 100 << 20,
    "setup_worker_path": ray_forks.__file__,
}
DYING = "killed at the end of step"


@contextmanager
def local_cluster(*modules: str, cpus: int = 12) -> Iterator[Any]:
    """Start a cluster of one node, and shut it down at the end; actors have imported `modules` already."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    with ray_forks.served(*modules):
        try:
            add_node(cluster, cpus)
            ray.init(cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Any, cpus: int) -> None:
    """Start a node with processes of its own."""
    for left in reversed(range(TRIES)):
        try:
            cluster.add_node(num_cpus=cpus, **OPTIONS)
            return
        except Exception as error:  # Ray raises nothing narrower
            if not left or "timed out during startup" not in str(error):
                raise


def node_of(process: int) -> str:
    """Return the id of the node that an actor's process is on."""
    import ray

    return next(
        actor["Address"]["NodeID"]
        for actor in ray._private.state.actors().values()
        if actor["Pid"] == process
    )


def killed_in_flight(folder: Path, step: int, changes: Mapping[str, Any]) -> None:
    """Train in a process that joins this one's cluster and is killed at the end of a step."""
    import ray

    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    said = ray_forks.printed(__file__, [str(folder), str(step), json.dumps(changes)], environment)
    assert said.endswith(f"{DYING} {step}\n"), said


def main() -> None:
    """Train the run that the command line names, up to the step."""
    from mmrl.training.loop import train
    from tests.support.toys import toy_run

    folder, step, changes = sys.argv[1:]
    run = toy_run(folder, **json.loads(changes))
    finish = run.finish

    def dying(at: int, *rest: Any) -> None:
        if at == int(step):
            assert run.ahead
            print(DYING, step, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        finish(at, *rest)

    run.finish = dying
    train(run)


if __name__ == "__main__":
    main()
