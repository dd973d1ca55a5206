"""Files that are whole or not there, whenever a process is killed, and folders that one run has alone."""

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
    """Give a name beside `path` to write to, which takes its place at the end: whoever reads finds the old
    file or the new one, also after a kill or a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    try:
        yield beside
        flush(beside)
        beside.replace(path)
        flush(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file by way of `replacing`."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
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
    """Have a folder to this run while a block runs; `ConfigError` where another process has it. The main
    process takes the lock, and the kernel gives it back when that ends, however it ends."""
    with ExitStack() as held:
        with processes.agreeing(f"locking '{folder}'"):
            if processes.main:
                held.enter_context(_lock(folder))
        yield


def check_free(folder: Path) -> None:
    """Raise `ConfigError` where another process has a folder; nothing is changed."""
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
