"""Runs the `main` of modules in processes that are forked from one that has imported what they need.

Imports take longer than what most processes of tests do. There are two servers, so that neighbouring ranks
differ in how Python salts its hashes, and iterate over sets in different orders, as on real machines. All
workers of one run of pytest share them. A forked process ends as any other one does, with what is registered
for the exit, but does not take its interpreter apart, which costs more than most of them do.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import Any, NoReturn

from mmrl.config.registry import HOMES, pieces
from mmrl.reporting.html.layout import macros, templates
from mmrl.reporting.model_card import card_template
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
KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET


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
    """The process that others are forked from; it ends when nobody is connected to it any more."""

    def __init__(self, name: str) -> None:
        self.link = socket.socket(*KIND)
        while self.link.connect_ex(name):  # nobody answers yet, or any more
            with socket.socket(*KIND) as door, suppress(OSError):  # another worker of pytest is first
                door.bind(name)
                door.listen()
                self.begin(door)
                self.link.connect(name)
                break
            time.sleep(PAUSE)

    def begin(self, door: socket.socket) -> None:
        """Start the process that answers at a door."""
        command = [sys.executable, "-m", __name__, str(door.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = {"stdin": subprocess.DEVNULL, "pass_fds": [door.fileno()]}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **given)

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
        self.link, other = socket.socketpair(*KIND)
        if not os.fork():
            self.link.close()
            call(serve([other]))
        other.close()


@cache
def server(number: int) -> Server:
    """Connect to a server, which is started once for all workers of a run of pytest."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    return Server(f"\0mmrl-tests-{run}-{number}")


def command(*arguments: str) -> Forked:
    """Run a command of the library."""
    return server(0).fork("mmrl.cli", arguments, os.environ)


# ---- inside the server


def serve(links: list[socket.socket], door: socket.socket | None = None) -> dict[str, Any] | None:
    """Fork until nobody is connected any more. In a forked process, return what was asked of it."""
    doors = [door] if door else []
    while links or (doors and select(doors, [], [], 0)[0]):
        for one in select(doors + links, [], [])[0]:
            if one is door:
                links.append(one.accept()[0])
            elif (asked := answer(one, links)) is not None:
                for each in doors + links:
                    each.close()
                return asked
    return None


def answer(link: socket.socket, links: list[socket.socket]) -> dict[str, Any] | None:
    """Answer a request, or forget a link that has ended; return the request in the process forked for it."""
    data, handles, _, _ = socket.recv_fds(link, 1 << 20, 1)
    if not data:
        links.remove(link)
        return link.close()
    asked = json.loads(data)
    if "over" in asked:
        ended, status = os.waitpid(asked["over"], os.WNOHANG)
        link.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
        return None
    if not (child := os.fork()):
        for standard in (1, 2):
            os.dup2(handles[0], standard)
        os.close(handles[0])
        return asked
    link.send(json.dumps(child).encode())
    os.close(handles[0])
    return None


def main() -> None:
    """Import what is needed, and serve; in a forked process, call what was asked for."""
    for name in NEEDED:
        importlib.import_module(name)
    for kind in HOMES:
        pieces(kind)
    compile_templates()
    draw_few()
    leave_unflushed()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads must not be forked"
    door = socket.socket(fileno=int(sys.argv[1]))
    call(serve([door.accept()[0]], door))


def compile_templates() -> None:
    """Compile the templates of pages and model cards, which each run renders."""
    macros()
    card_template()
    for name in ("page.j2", "predictions.j2", "samples.j2"):
        templates().get_template(name)


def call(asked: Mapping[str, Any] | None) -> NoReturn:
    """Call what was asked of a forked process; a server that nobody asks any more ends."""
    if not asked:
        sys.exit()
    if asked["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = [asked["module"], *asked["arguments"]]
    status: Any = 1
    try:
        status = importlib.import_module(asked["module"]).main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main()
