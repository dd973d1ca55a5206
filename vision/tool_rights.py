"""What a tool may do: the files, the network and the processes that its configuration declares."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DECLARED = ("reads", "writes", "network", "process")  # settings of a tool that give it rights
PROCESS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.")
NETWORK = ("socket.bind", "socket.connect", "socket.send", "socket.get", "urllib.")
# Events of a path, and which of their arguments are paths; all but the first two change files.
LISTS = ("os.listdir", "os.scandir")
CHANGES = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2,
    "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.move": 2,
    "sqlite3.connect": 1,
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CODE = (".py", ".pyc", ".so", ".pyd")  # what an import inside of a tool reads
_RIGHTS: ContextVar[Rights | None] = ContextVar("rights", default=None)


@dataclass(frozen=True)
class Rights:
    """What a call may do besides computing; anything else raises PermissionError inside of the tool.

    An audit hook of Python looks at files, sockets and processes that Python code opens in the thread of the
    call. It keeps arguments that a model writes from leading a tool astray; code that means harm, threads
    that a tool starts and libraries that open files by themselves are not held, for which there are
    containers.

    Args:
        reads: Files and folders that may be read; the installed packages always may.
        writes: Files and folders that may be read and changed.
        network: Whether it may use the network.
        process: Whether it may start processes.
    """

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    network: bool = False
    process: bool = False

    @staticmethod
    def declared(call: Mapping[str, Any], options: Mapping[str, Any], *, shipped: bool) -> Rights | None:
        """Read the settings of a tool; None, for no limits, where a tool of the user declares nothing.

        Files that its options name may be read.
        """
        if not shipped and not any(name in call for name in DECLARED):
            return None
        named = [value for value in options.values() if isinstance(value, str) and os.path.exists(value)]
        return Rights(
            _resolved((*call.get("reads", ()), *named)),
            _resolved(call.get("writes", ())),
            call.get("network", False),
            call.get("process", False),
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold what runs inside the block, in this thread, to these rights."""
        _install()
        token = _RIGHTS.set(self)
        try:
            yield
        finally:
            _RIGHTS.reset(token)

    def refusal(self, event: str, args: tuple) -> str:
        """Say what is not allowed about an event of Python's audit; empty where all is."""
        if event.startswith(PROCESS) and not self.process:
            return "it starts a process; declare `process: true`"
        if event.startswith(NETWORK) and not self.network:
            return "it uses the network; declare `network: true`"
        if event == "open":
            path, mode, flags = args
            writes = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & WRITING)
            return self._about(path, writes=writes)
        if event in LISTS:
            return self._about(args[0], writes=False)
        paths = args[: CHANGES.get(event, 0)]
        return next(filter(None, (self._about(path, writes=True) for path in paths)), "")

    def _about(self, path: Any, *, writes: bool) -> str:
        if isinstance(path, int) or path == ":memory:":  # a file that is open already, or none
            return ""
        path = "." if path is None else path  # the working folder
        place = Path(os.path.realpath(os.fsdecode(path)))
        allowed = self.writes if writes else (*self.reads, *self.writes, *_own_places())
        if any(place.is_relative_to(root) for root in allowed) or str(place) == os.devnull:
            return ""
        if not writes and place.suffix in CODE:
            return ""
        verb, key = ("changes", "writes") if writes else ("reads", "reads")
        return f"it {verb} '{place}'; declare `{key}`"


def _resolved(paths: Any) -> tuple[Path, ...]:
    return tuple(Path(os.path.realpath(Path(path).expanduser())) for path in paths)


@cache
def _own_places() -> tuple[Path, ...]:
    """List the folders of Python, of installed packages and of what they read of the system."""
    known = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    system = ("/usr/share", "/usr/lib", "/etc/localtime", "/etc/ssl", "/etc/mime.types", "/dev/urandom")
    return _resolved(sorted({*known, *system, "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system"}))


@cache
def _install() -> None:
    """Add the audit hook, which cannot be taken off again and does nothing outside of tools."""
    _own_places()
    sys.addaudithook(_look)


def _look(event: str, args: tuple) -> None:
    rights = _RIGHTS.get()
    if rights is not None and (why := rights.refusal(event, args)):
        raise PermissionError(f"the tool has no right to this: {why}")
