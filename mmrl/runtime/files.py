"""Atomic file writes that survive a kill, and locks on output folders."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mmrl.config.schema import ConfigError

if TYPE_CHECKING:
    from mmrl.runtime.distributed import Processes

LOCK = ".lock"
log = logging.getLogger("mmrl")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end, atomically even on a kill or power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, processes: Processes) -> Iterator[None]:
    """Lock a folder for this run; raises `ConfigError` where another process has the lock.

    The main process takes the lock, which the kernel releases when that process ends in any way.
    """
    with ExitStack() as stack:
        with processes.agreeing(f"locking '{folder}'"):
            if processes.main:
                stack.enter_context(_lock(folder))
        yield


def check_free(folder: Path) -> None:
    """Raise `ConfigError` where another process has locked a folder."""
    if (folder / LOCK).exists():
        with (folder / LOCK).open() as file:
            _flock(file, fcntl.LOCK_SH, folder)


def _lock(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+")
    _flock(file, fcntl.LOCK_EX, folder)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _flock(file: TextIO, how: int, folder: Path) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"'{folder}' is in use by {file.read().strip() or 'another process'}; wait until that ends, stop "
            "it, or name another output folder"
        ) from None
    except OSError as error:  # some network file systems are mounted without locks
        log.warning("cannot lock '%s' (%s): make sure that only one process writes there", folder, error)
