"""A cluster of Ray on this machine, for tests, and a run on it that is killed.

`python -m tests.support.ray_cluster FOLDER STEP CHANGES` trains a toy run, with its changes in JSON, and ends
itself by SIGKILL at the end of a step, while the workers make the rollouts of the next one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def killed_in_flight(folder: Path, step: int, changes: Mapping[str, Any]) -> None:
    """Train in a process that joins this one's cluster and is killed at the end of a step."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", __name__, str(folder), str(step), json.dumps(changes)]
    ended = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": address}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr


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
            os.kill(os.getpid(), signal.SIGKILL)
        finish(at, *rest)

    run.finish = dying
    train(run)


if __name__ == "__main__":
    main()
