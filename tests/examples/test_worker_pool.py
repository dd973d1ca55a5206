"""Workers of demos end with the process that made them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from examples.worker_pool import Here, workers

ROOT = Path(__file__).parents[2]
PARENT = """
from examples.worker_pool import workers
from tests.examples.test_worker_pool import sleep_long

if __name__ == "__main__":
    with workers(2) as pool:
        list(pool.map(sleep_long, {folders}))
"""


def sleep_long(folder: str) -> None:
    """Write who this is, and do not end."""
    Path(folder).write_text(f"{os.getpid()} {torch.get_num_threads()}")
    time.sleep(600)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(reached, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(folders=[str(file) for file in files]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=environment)
    wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
    pids, threads = zip(*(map(int, file.read_text().split()) for file in files), strict=True)
    assert threads == (1, 1) and all(map(alive, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(alive, pids)), 20)


def test_one_job_is_this_process():
    with workers(1) as pool:
        assert isinstance(pool, Here) and list(pool.map(lambda x, y: x + y, (1, 2), (3, 4))) == [4, 6]
