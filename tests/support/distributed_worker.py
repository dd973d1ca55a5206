"""One of several processes that train toy policies: `python -m tests.support.distributed_worker plans.json`.

The file lists whole configurations, one mapping a run. Weights of every process go to `weights-{rank}` in the
run's folder; where a run fails, why goes to `failed-{rank}`, and the process ends with code 3. Whether the
process group was left when Python ends goes to `left-{rank}` beside the list.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.reporting import html
from mmrl.training import checkpointing
from mmrl.training.loop import train
from tests.support.fork_server import Forked, server


def start(module: str, arguments: Sequence[str], world: int, **more: str) -> list[Forked]:
    """Call the `main` of a module on `world` processes that find each other, with `more` in their
    environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": 1} | more
    shared = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return [
        server(rank % 2).fork(module, arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]


def launch(
    plans: Sequence[Mapping[str, Any]], folder: Path, world: int = 2, failing: bool = False, **more: str
) -> list[str]:
    """Train on `world` processes, as a launcher would start them; give what they print, or fail with it.

    `more` is their environment: UPLOAD_SECONDS takes the place of an upload to the hub.
    """
    listed = folder / "plans.json"
    listed.write_text(json.dumps(plans))
    processes = start("tests.support.distributed_worker", [str(listed)], world, **more)
    try:
        printed = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes) and not failing:
        raise RuntimeError("\n".join(printed))
    return printed


def note_leaving(folder: Path) -> None:
    """Write whether this process left its process group."""
    left = not torch.distributed.is_initialized()
    (folder / f"left-{os.environ['RANK']}").write_text(json.dumps(left))


def main() -> None:
    # Such functions run in the reverse order, so this one runs after those of the library.
    atexit.register(note_leaving, Path(sys.argv[1]).parent)
    html.write_page = lambda folder: folder  # which takes longer than everything else
    seconds = float(os.environ.get("UPLOAD_SECONDS", "0"))
    checkpointing.push = lambda *given: time.sleep(seconds) or "the hub"
    for plan in json.loads(Path(sys.argv[1]).read_text()):
        run = build(parse(plan, Config), quiet=True)
        rank = run.processes.rank
        try:
            train(run)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            (run.folder / f"failed-{rank}").write_text(why)
            print(
                f"failed: {why}", file=sys.stderr
            )  # as the command does, and the watch where it ends a process
            sys.exit(3)
        run.policy.save(run.folder / f"weights-{rank}")


if __name__ == "__main__":
    main()
