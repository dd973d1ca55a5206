"""What a tool may do: the files, the network and the processes that its configuration declares."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrl.config.binding import RIGHTS

PROCESS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.")
NETWORK = ("socket.bind", "socket.connect", "socket.send", "socket.get", "urllib.")
# Events of a path, and which of their arguments are paths; all but the first ones change files.
LISTS = ("os.listdir", "os.scandir", "os.getxattr", "os.listxattr")
CHANGES = {
    "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2,
    "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.move": 2,
    "sqlite3.connect": 1, "os.setxattr": 1, "os.removexattr": 1, "os.mkfifo": 1, "os.mknod": 1,
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNAUDITED = ("mkfifo", "mknod")  # functions of `os` that make files without an event of Python's audit
CODE = (".py", ".pyc", ".so", ".pyd")  # what an import inside of a tool reads, of importable packages
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
        if not shipped and not any(name in call for name in RIGHTS):
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
        if event == "os.chdir":
            return "it changes the working folder, which is that of the whole run"
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
        if not writes and any(_is_import(place, folder) for folder in _importable()):
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


def _importable() -> Iterator[Path]:
    """List the folders that imports look into: those of the path, and of packages that are loaded."""
    yield from map(_resolve, sys.path)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):  # whose own `__getattr__` may make up a path
            yield from map(_resolve, vars(module).get("__path__", ()))


def _is_import(place: Path, folder: Path) -> bool:
    """Return whether an import reads this: code, or the list of what is in a folder.

    A list that is refused would be kept as an empty one, for later imports of the whole run.
    """
    return place == folder or (place.suffix in CODE and place.is_relative_to(folder))


@cache
def _resolve(folder: str) -> Path:
    return Path(os.path.realpath(folder))


@cache
def _install() -> None:
    """Add the audit hook, which cannot be taken off again and does nothing outside of tools."""
    _own_places()
    sys.addaudithook(_look)
    for name in filter(os.__dict__.get, UNAUDITED):  # Windows has none of them
        setattr(os, name, _audited(name, getattr(os, name)))


def _audited(name: str, function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def audited(path: Any, *args: Any, **options: Any) -> None:
        sys.audit(f"os.{name}", path)
        function(path, *args, **options)

    return audited


def _look(event: str, args: tuple) -> None:
    rights = _RIGHTS.get()
    if rights is None:
        return
    token = _RIGHTS.set(None)  # looking may read folders itself
    try:
        why = rights.refusal(event, args)
    finally:
        _RIGHTS.reset(token)
    if why:
        raise PermissionError(f"the tool has no right to this: {why}")
