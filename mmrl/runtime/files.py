"""Atomic file writes that survive a kill, locks on output folders, and uploads to the hub."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mmrl.config.schema import Config, ConfigError
from mmrl.core.plain_text import whole

if TYPE_CHECKING:
    from mmrl.runtime.distributed import Processes


LOCK = ".lock"
log = logging.getLogger("mmrl")


@contextmanager
def replacing(path: Path, suffix: str = "tmp") -> Iterator[Path]:
    """Yield a temporary path for a file that replaces `path` atomically on exit, even in a power cut.

    If several processes may write the same file at the same time, each needs its own `suffix`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{suffix}")
    try:
        yield temporary
        flush(temporary)  # content must reach the disk before the new name
        temporary.replace(path)
        flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(whole(text), encoding="utf-8")


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():  # rmtree refuses links
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can read; raise `ConfigError` if it belongs to another user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = folder.lstat()
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode):  # a link may lead elsewhere
        raise ConfigError(f"'{folder}' belongs to another user, or is a link; name another folder")
    folder.chmod(0o700)


def one_line(error: Exception, limit: int | None = None) -> str:
    """Format an error on one line: its type and the first `limit` characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:limit]}"


@contextmanager
def locked(folder: Path, processes: Processes) -> Iterator[None]:
    """Lock a folder for a run of several processes; raises `ConfigError` if another run has the lock."""
    with ExitStack() as stack:
        with processes.fail_together(f"locking '{folder}'"):
            if processes.main:
                stack.enter_context(hold(folder))
        yield


@contextmanager
def hold(folder: Path, *, leave: bool = True) -> Iterator[None]:
    """Lock a folder for this process; raises `ConfigError` if another process has the lock.

    The kernel releases the lock however the process ends. `leave=False` deletes the lock file on exit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with ExitStack() as stack:
        while True:
            file = stack.enter_context(path.open("a+"))  # "w" would erase the owner's name
            _flock(file, fcntl.LOCK_EX, folder)
            # Retry if the previous owner removed the file when it ended.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            if not leave:
                path.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Raise `ConfigError` if another process has locked a folder."""
    if (folder / LOCK).exists():
        with (folder / LOCK).open() as file:
            _flock(file, fcntl.LOCK_SH, folder)  # shared, so that several processes may check at once


def flock(file: TextIO, how: int) -> None:
    """Call `fcntl.flock` on an open file; on a file system without locks, warn once and continue.

    Raises `BlockingIOError` if `how` has LOCK_NB and another process has the lock.
    """
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError as error:  # some network file systems are mounted without locks
        _warn_of_no_locks(str(Path(file.name).parent), str(error))


@cache
def _warn_of_no_locks(folder: str, error: str) -> None:
    log.warning("cannot lock '%s' (%s): make sure that only one process writes there", folder, error)


def _flock(file: TextIO, how: int, folder: Path) -> None:
    try:
        flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)  # "a+" starts at the end
        raise ConfigError(
            f"'{folder}' is in use by {file.read().strip() or 'another process'}; wait until that ends, stop "
            "it, or name another output folder"
        ) from None


# ---- uploads to the Hugging Face hub


class HubError(RuntimeError):
    """Raised if an upload to the hub fails; the model is still on disk."""


def check_hub(config: Config) -> None:
    """Raise `ConfigError` if `push_to_hub` lacks a valid `hub_model_id`."""
    if config.push_to_hub and (not config.hub_model_id or config.hub_model_id.count("/") > 1):
        raise ConfigError(
            f"'push_to_hub' wants 'hub_model_id' as owner/name, not '{config.hub_model_id}'; set it (the "
            "owner may be left out: you), or push_to_hub=false"
        )


def push(config: Config, folder: Path, step: int) -> str:
    """Upload the model folder of a run to the hub, and return its address."""
    return upload(folder, config.hub_model_id, f"Step {step}", private=config.hub_private_repo)


def upload(folder: Path, name: str, message: str, *, private: bool) -> str:
    """Upload a folder to the hub with the credentials of `hf auth login`, and return its address."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ImportError("an upload needs huggingface_hub; pip install huggingface_hub") from error
    try:
        api = HfApi()
        repository = api.create_repo(name, private=private, exist_ok=True)
        name = getattr(repository, "repo_id", name)  # includes the owner
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message)
    except Exception as error:  # errors of the client or of its HTTP library
        raise HubError(
            f"cannot upload '{folder}' to '{name}': {one_line(error, 200)}. The model is on disk; when "
            f"the hub can be reached and `hf auth login` was done, run: hf upload {name} {folder}"
        ) from error
    return f"https://huggingface.co/{name}"
