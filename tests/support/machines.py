"""Two machines made of network namespaces that a virtual cable joins, and launches on both.

Each has an address, a name and a loopback device of its own, so nothing that is meant for one machine works
by accident. Needs root and `ip` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mmrl.core.rng import Stream
from tests.support.fork_server import Forked, server

ADDRESSES = ("10.97.41.1", "10.97.41.2")
PORT = 29417
LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def unable() -> str:
    """Say why namespaces cannot be made here; empty where they can."""
    if not shutil.which("ip"):
        return "there is no program `ip`"
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
        self.started: list[Forked] = []

    def unplug(self) -> None:
        """Cut the cable, as when a machine is switched off: nobody gets a packet any more."""
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def start(self, number: int, command: Sequence[str], **more: str) -> Forked:
        """Call a launcher on a machine."""
        told = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"} | more
        place = self.names[number], f"machine{number}", LAUNCHERS[command[0]]
        given = [*place, *command[1:]]
        process = server(number).fork("tests.support.forked_launch", given, {**os.environ, **told})
        self.started.append(process)
        return process

    def wait(self, number: int, timeout: float = 600) -> str:
        """Wait for what was started on a machine to end, and give what it wrote."""
        try:
            return self.started[number].communicate(timeout)[0]
        except subprocess.TimeoutExpired as error:
            written = "\n".join(f"machine {i}: {self.printed(i)}" for i in range(len(self.started)))
            raise TimeoutError(f"machine {number} is not done after {timeout} s\n{written}") from error

    def printed(self, number: int) -> str:
        """Give what a machine has written so far."""
        return self.started[number].printed()

    def stop(self) -> None:
        """End all that runs on the machines, also what launchers have put into sessions of their own."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait(30)


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
        machines.stop()
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


class Dying:
    """A label whose process is killed, or waits, at a step on the second machine, once.

    It stands here and not in its test, so that the processes on the machines don't import the test.
    """

    def __init__(self, *, stream: Stream, how: str, once: str, step: int = 3) -> None:
        self.stream, self.how, self.once, self.step = stream, how, Path(once), step

    def __call__(self, prompts, outcomes):
        if os.environ.get("RANK") == "1" and self.stream.step == self.step and not self.once.exists():
            self.once.touch()
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return [0.0] * len(outcomes)
