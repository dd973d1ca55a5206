"""Starts the workers of a Ray cluster as forks of a process that has imported what their actors need.

Ray starts a worker with two interpreters in turn, each of which imports Ray, and the actor imports torch.
That takes longer than what most actors of tests do. Workers with a `runtime_env` are started as Ray does it.

This file is run in place of Ray's `setup_worker.py`, and as the process that is forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

ADDRESS = "MMRL_TEST_RAY_FORKS"  # variable with the name of the server's socket
NEEDED = (  # without Ray, which reads at its import what its raylet tells a worker, but with what Ray imports
    "google.protobuf.json_format",
    "jsonschema",
    "mmrl.engines.ray_workers",
    "mmrl.runtime.ray_rewards",
    "requests",
    "tests.support.ray_pieces",
    "tests.support.toys",
)
PASSED = ("--serialized-runtime-env-context=", "--language=")  # options of `setup_worker.py` alone


@contextmanager
def served(*modules: str) -> Iterator[None]:
    """Start the process that is forked, with more modules, and name it to the nodes that are started."""
    name = f"mmrl-ray-forks-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        command = [sys.executable, "-m", __name__, str(listener.fileno()), *modules]
        os.environ[ADDRESS] = name
        server = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # which this process leaves open as long as it lives
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    assert server.stdout is not None
    assert server.stdout.readline(), "the process to fork has ended"
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        server.communicate()


def printed(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a script in a fork, and return what it printed when it has ended."""
    read, write = os.pipe()
    ask([script, *arguments], environment, write)
    os.close(write)
    with open(read) as output:
        return output.read()


def ask(arguments: Sequence[str], environment: Mapping[str, str], output: int) -> None:
    """Ask for a fork that runs a script with arguments."""
    asked = {"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(f"\0{environment[ADDRESS]}")
        socket.send_fds(link, [json.dumps(asked).encode()], [output])
        link.recv(1)  # until there is a fork


# ---- in place of `setup_worker.py`


def set_up(arguments: list[str]) -> None:
    """Ask for a fork that runs Ray's worker, or run Ray's own script where an environment is to be made."""
    given = [x.partition("=")[2] for x in arguments if x.startswith(PASSED[0])]
    if given in ([], ["{}"]):
        ask([x for x in arguments if not x.startswith(PASSED)], os.environ, 2)
        return
    from ray._private.workers import setup_worker

    sys.argv = [setup_worker.__file__, *arguments]
    runpy.run_path(setup_worker.__file__, run_name="__main__")


# ---- inside the server


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork until the process ends that started this one. In a forked process, return what was asked of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork that has ended
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        with listener.accept()[0] as link:
            data, (output,), _, _ = socket.recv_fds(link, 1 << 18, 1)
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                return json.loads(data)
            os.close(output)
    os._exit(0)


def main() -> None:
    """Import what is needed, and serve; in a forked process, run a script."""
    from mmrl.config.registry import pieces

    for name in (*NEEDED, *sys.argv[2:]):
        importlib.import_module(name)
    for kind in ("engine", "policy", "reward"):
        pieces(kind)
    assert "ray" not in sys.modules
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads must not be forked"
    print("ready", flush=True)
    gc.freeze()  # what was imported is shared with the forks as long as no collection touches it
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        asked = serve(listener)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = asked["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main() if sys.argv[1].isdecimal() else set_up(sys.argv[1:])
