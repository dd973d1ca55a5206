"""Calls a launcher of processes on a machine of `machines`: its workers are forked, as this process is.

Arguments: the machine's network namespace and name, the module of the launcher, and what the launcher is
given. Only the start of each interpreter is left out, which takes longer than the training of the workers.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from unittest import mock

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.support.fork_server import Forked, Neighbour

NAMESPACES = "/run/netns"  # where `ip netns` keeps them
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def enter(namespace: str, name: str) -> None:
    """Move this process, which has one thread, to a network namespace, and give it a host name of its own."""
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"{NAMESPACES}/{namespace}") as place:
        failed = system.setns(place.fileno(), CLONE_NEWNET) or system.unshare(CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace '{namespace}'")
    socket.sethostname(name)


def main() -> None:
    """Enter the machine, and launch."""
    namespace, name, launcher, *given = sys.argv[1:]
    enter(namespace, name)
    workers = Neighbour()

    def popen(handler: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]) -> Forked:
        module, *arguments = command[command.index("-m") + 1 :]
        return workers.fork(module, arguments, environment, os.dup(1))

    sys.argv = [launcher, *given]
    with mock.patch.object(SubprocessHandler, "_popen", popen):
        importlib.import_module(launcher).main()
