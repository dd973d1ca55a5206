"""Runs the `main` of modules in processes that are forked from one that has imported what they need.

Imports take longer than what most processes of tests do. There are two servers, so that neighbouring ranks
differ in how Python salts its hashes, and iterate over sets in different orders, as on real machines. A
forked process ends as any other one does, with the finalisation of its interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from mmrl.config.registry import HOMES, pieces
from tests.support.quick import draw_few, leave_unflushed

ROOT = Path(__file__).parents[2]
NEEDED = (  # without pandas, which starts a thread
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "peft",
    "tests.support.agreement_worker",
    "tests.support.real_worker",
    "torch._dynamo",  # which optimizers import
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
)
PAUSE = 0.01  # seconds between two looks at a process


class Forked:
    """A process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, server: Server, output: int) -> None:
        self.pid, self.server, self.output = pid, server, output
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = self.server.ask({"over": self.pid})
        return self.returncode

    def kill(self) -> None:
        """End the process, unless it has ended."""
        if self.poll() is None:  # nobody else gets its number before the server has waited for it
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end, and return what was printed."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, self.printed())
            time.sleep(PAUSE)
        return self.printed(), None

    def wait(self, timeout: float) -> int:
        """Wait for the end, and return the exit status."""
        self.communicate(timeout)
        assert self.returncode is not None
        return self.returncode

    def printed(self) -> str:
        """Return what was printed so far."""
        return os.pread(self.output, os.fstat(self.output).st_size, 0).decode(errors="replace")

    def __del__(self) -> None:
        os.close(self.output)


class Server:
    """The process that others are forked from; it ends with the one that started it."""

    def __init__(self) -> None:
        self.link, other = link()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> Forked:
        """Call the `main` of a module in a process of its own.

        With an `output`, a descriptor, the process writes there and begins a session, as those of launchers.
        """
        asked = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        asked["session"] = output is not None
        # Memory and no pipe: nobody reads while the process runs, and a full pipe would stop it.
        output = os.memfd_create(module) if output is None else output
        return Forked(self.ask(asked, output), self, output)

    def ask(self, what: Mapping[str, Any], *handles: int) -> Any:
        """Send a request, and return the answer."""
        socket.send_fds(self.link, [json.dumps(what).encode()], handles)
        answer = self.link.recv(1 << 10)
        if not answer:
            raise RuntimeError("the server has ended")
        return json.loads(answer)


class Neighbour(Server):
    """A server that is forked from this process, which has imported what is needed and has one thread."""

    def __init__(self) -> None:
        self.link, other = link()
        with other:
            asked = None if (parent := os.fork()) else serve(other)
        if not parent:
            call(asked)


def link() -> tuple[socket.socket, socket.socket]:
    """Connect a server with who asks it."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@cache
def server(number: int) -> Server:
    """Start a server, once."""
    return Server()


def command(*arguments: str) -> Forked:
    """Run a command of the library."""
    return server(0).fork("mmrl.cli", arguments, os.environ)


# ---- inside the server


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork until nobody asks any more. In a forked process, return what was asked of it."""
    while True:
        data, handles, _, _ = socket.recv_fds(link, 1 << 20, 1)
        if not data:
            return None
        asked = json.loads(data)
        if "over" in asked:
            ended, status = os.waitpid(asked["over"], os.WNOHANG)
            link.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            continue
        if not (child := os.fork()):
            for standard in (1, 2):
                os.dup2(handles[0], standard)
            os.close(handles[0])
            return asked
        link.send(json.dumps(child).encode())
        os.close(handles[0])


def main() -> None:
    """Import what is needed, and serve; in a forked process, call what was asked for."""
    for name in NEEDED:
        importlib.import_module(name)
    for kind in HOMES:
        pieces(kind)
    draw_few()
    leave_unflushed()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads must not be forked"
    with socket.socket(fileno=int(sys.argv[1])) as link:
        asked = serve(link)
    call(asked)


def call(asked: Mapping[str, Any] | None) -> NoReturn:
    """Call what was asked of a forked process; a server that nobody asks any more ends."""
    if not asked:
        sys.exit()
    if asked["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = [asked["module"], *asked["arguments"]]
    sys.exit(importlib.import_module(asked["module"]).main())


if __name__ == "__main__":
    main()
