"""One of several processes that train the toy policy: `python -m tests.distributed_worker plans.json`.

The file lists keyword arguments of `tests.toys.toy_run`, one mapping a run. Weights of every process go to
`weights-{rank}` in the run's folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl import page
from mmrl.train import train
from tests.toys import toy_run


def launch(plans: Sequence[Mapping[str, Any]], folder: Path, world: int = 2) -> None:
    """Train on `world` processes, as a launcher would start them; fail with what they print."""
    listed = folder / "plans.json"
    listed.write_text(json.dumps(plans))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        told |= {"MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": 1}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed_worker", str(listed)],
                env={**os.environ, **{name: str(value) for name, value in told.items()}},
                cwd=Path(__file__).parents[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(printed))


def main() -> None:
    page.curves = lambda runs: []  # drawing takes longer than everything else
    for plan in json.loads(Path(sys.argv[1]).read_text()):
        run = toy_run(**plan)
        train(run)
        run.policy.save(run.folder / f"weights-{run.processes.rank}")


if __name__ == "__main__":
    main()
