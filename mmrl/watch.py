"""Processes that tell each other of their end, so that nobody waits in a collective for one that is gone.

A process that fails writes why into a small store; a thread of every other process reads it. Where the main
thread still waits half a minute later, the process is ended with the reason on its standard error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

PERIOD = 0.25  # seconds between two looks
GRACE = 30.0  # seconds that a process has to notice by itself
FAREWELL = 5.0  # seconds that a failed process waits for the others to hear
KEY = "failed"


class ProcessFailed(RuntimeError):
    """Another process failed, and this one cannot go on without it."""


class Watch:
    """Listens for the failure of other processes while a block runs, and tells them of its own, unless that
    is `known` to all."""

    def __init__(
        self, rank: int, world: int, exchange: Callable[[bytes], list[bytes]], known: Callable[[], bool]
    ) -> None:
        self.rank, self.world, self.known = rank, world, known
        self.store = self._connect(exchange)
        self.heard = ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)

    def _connect(self, exchange: Callable[[bytes], list[bytes]]):
        from torch.distributed import TCPStore

        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=60)
        own = TCPStore(host, 0, None, True, timeout=limit, wait_for_workers=False) if self.rank == 0 else None
        port = int(exchange(str(own.port if own else 0).encode())[0])
        return own or TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.known():
            self._leave()
            self._rest()
            return
        others = self._told_by_others()
        if not others:
            self._tell(f"process {self.rank} of {self.world} failed: {kind.__name__}: {error}")
        self.over.set()
        self._rest()
        if others:
            raise ProcessFailed(others) from error

    def _rest(self) -> None:
        """Wait for the listener: a thread that the end of the interpreter meets inside the store aborts the
        process."""
        self.thread.join(FAREWELL)

    def _leave(self) -> None:
        """Part in good order: the one that holds the store goes last."""
        self.store.add("done", 1)
        if self.rank == 0:
            self._wait_for("done", self.world)
        self.over.set()

    def _tell(self, words: str) -> None:
        try:
            if self.store.compare_set(KEY, "", words).decode() == words:
                self._wait_for("heard", self.world - 1)
        except RuntimeError:  # the others are gone, and the store with them
            return

    def _wait_for(self, name: str, count: int) -> None:
        until = time.monotonic() + FAREWELL
        while self.store.add(name, 0) < count and time.monotonic() < until:
            time.sleep(PERIOD / 5)

    def _told_by_others(self) -> str:
        """Give another process's last words; a broken collective may be quicker than they are."""
        until = time.monotonic() + 4 * PERIOD
        while not self.heard and time.monotonic() < until:
            time.sleep(PERIOD / 5)
        return self.heard

    def _listen(self) -> None:
        while not self.over.wait(PERIOD):
            try:
                if not self.store.check([KEY]):
                    continue
                words = self.store.get(KEY).decode()
            except RuntimeError:  # the store is gone, and with it process 0
                words = f"process 0 of {self.world} is gone without a word"
            if words.startswith(f"process {self.rank} "):
                return
            self.heard = words
            self._acknowledge()
            if not self.over.wait(GRACE):
                os.write(2, f"failed: {ProcessFailed.__name__}: {words}\n".encode())
                os._exit(1)
            return

    def _acknowledge(self) -> None:
        try:
            self.store.add("heard", 1)
        except RuntimeError:
            return
