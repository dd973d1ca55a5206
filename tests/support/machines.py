"""Two machines made of network namespaces that a virtual cable joins, and launches on both.

Each has an address, a name and a loopback device of its own, so nothing that is meant for one machine works
by accident. Needs root, `ip` of iproute2 and `unshare`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.97.41.1", "10.97.41.2")
PORT = 29417
ROOT = Path(__file__).parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def unable() -> str:
    """Say why namespaces cannot be made here; empty where they can."""
    for program in ("ip", "unshare"):
        if not shutil.which(program):
            return f"there is no program `{program}`"
    name = f"mmrl-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    ip("netns", "del", name)
    return ""


class Machines:
    """Two namespaces by number."""

    def __init__(self) -> None:
        self.names = [f"mmrl-{os.getpid()}-{i}" for i in range(2)]
        self.started: list[subprocess.Popen] = []

    def unplug(self) -> None:
        """Cut the cable, as when a machine is switched off: nobody gets a packet any more."""
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def start(self, number: int, command: Sequence[str], **more: str) -> subprocess.Popen:
        """Start a command of the Python environment on a machine."""
        program = str(Path(sys.executable).parent / command[0])
        named = f'hostname machine{number}; exec "$0" "$@"'
        own = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", named]
        told = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"} | more
        process = subprocess.Popen(
            [*own, program, *command[1:]],
            env={**os.environ, **told},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Make two machines, and take them away again with all that still runs on them."""
    machines = Machines()
    first, second = machines.names
    try:
        for name in machines.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(machines.names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield machines
    finally:
        for process in machines.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        for name in machines.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def torchrun(number: int, *command: str, processes: int = 1, restarts: int = 0) -> list[str]:
    """Write down a launch of `processes` on each of two machines, as it is started on one of them."""
    return [
        "torchrun",
        "--nnodes=2",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}",
        f"--local-addr={ADDRESSES[number]}",
        f"--rdzv-conf=is_host={int(number == 0)},join_timeout=300",
        "-m",
        *command,
    ]


def accelerate(number: int, *command: str) -> list[str]:
    """Write down the same with accelerate's launcher, one process on each machine."""
    return [
        "accelerate",
        "launch",
        "--config_file=configs/accelerate/ddp.yaml",
        "--num_machines=2",
        "--num_processes=2",
        f"--machine_rank={number}",
        f"--main_process_ip={ADDRESSES[0]}",
        f"--main_process_port={PORT}",
        "-m",
        *command,
    ]
