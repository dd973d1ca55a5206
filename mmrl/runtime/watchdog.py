"""Watchdog that ends all processes of a run if one fails, hangs or is lost.

A failing process writes the reason into a `TCPStore`, which a thread of every other process reads. A process
whose main thread still waits half a minute later exits and prints the reason. The same happens if a process
does not reach a collective within a limit, and sooner if a process is killed or unreachable.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType

from mmrl.runtime.links import Links

PERIOD = 0.25  # seconds between two reads of the store
GRACE = 30.0  # seconds that a process has to end by itself after another process failed
SOON = 5.0  # seconds that a process has to end by itself after another was lost
FAREWELL = 5.0  # seconds that a failed process waits for the others to read the reason
KEY = "failed"
LATE = "did not come to"  # marks messages about a process that hangs
GONE = ") is gone: "  # marks messages about a lost process


@dataclass
class Stop:
    """The name of the first signal that requested a stop; empty until then."""

    asked: str = ""


@contextmanager
def listening(loud: bool) -> Iterator[Stop]:
    """Treat SIGTERM and SIGINT (Ctrl-C) as requests to stop inside this context.

    The second signal raises `KeyboardInterrupt`. Outside the main thread this context does nothing.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.asked:
            raise KeyboardInterrupt(f"{name} for the second time")
        stop.asked = name
        if loud:
            # A handler may interrupt a print to the same stream, so write to the file descriptor.
            os.write(2, f"\n{name}: this step is finished and saved; once more to leave at once\n".encode())

    inside_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if inside_main else ()
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ProcessFailed(RuntimeError):
    """Raised because another process failed, so that this one cannot continue."""


class Watch:
    """Context that exchanges failures with the other processes.

    Args:
        rank: Rank of this process.
        world: Number of processes.
        exchange: Gathers bytes from every process, in order of rank.
        known: Returns whether all processes already know of this process's failure.
        limit: Seconds that a process may be late at a collective.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        exchange: Callable[[bytes], list[bytes]],
        known: Callable[[], bool],
        limit: float,
    ) -> None:
        from torch.distributed import TCPStore

        self.rank, self.world, self.known, self.limit = rank, world, known, limit
        self.place = (0, "the beginning")  # number and name of the last collective of this process
        self.waiting = False
        self.stays = 0  # numbers the calls of `waiting_for_main`
        self.heard = ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)

        def connect(port: int, hosts: bool) -> TCPStore:
            address, patience = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=60)
            return TCPStore(address, port, None, hosts, timeout=patience, wait_for_workers=False)

        own = connect(0, True) if rank == 0 else None
        port = int(exchange(str(own.port if own else 0).encode())[0])
        self.store = own or connect(port, False)
        self.links = Links(rank, world, exchange, self._lost)

    @contextmanager
    def meeting(self, where: str) -> Iterator[None]:
        """Announce a collective named `where`, in which this process waits for all others."""
        self.place, self.waiting = (self.place[0] + 1, where), True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def waiting_for_main(self) -> Iterator[None]:
        """Let the other processes wait without a timeout until process 0 reaches the end of this context."""
        self.stays += 1
        key = f"left {self.stays}"
        yield
        if self.rank == 0:
            self.store.set(key, "")
        while self.rank and not self.store.check([key]):
            if self.heard:
                raise ProcessFailed(self.heard)
            time.sleep(PERIOD)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        others = ""
        if error is None or self.known():
            self.store.add("done", 1)
            if self.rank == 0:  # rank 0 hosts the store and must leave last
                self._wait(lambda: self.store.add("done", 0) >= self.world)
        else:
            self._wait(lambda: self.heard, 4 * PERIOD)  # let the reason of a broken collective arrive
            others = self.heard
            if not others:
                words = f"process {self.rank} of {self.world} failed: {type(error).__name__}: {error}"
                with suppress(RuntimeError):  # rank 0 and its store may be gone
                    if self.store.compare_set(KEY, "", words).decode() == words:
                        self._wait(lambda: self.store.add("heard", 0) >= self.world - 1)
        self.over.set()
        self.links.close()
        self.thread.join(FAREWELL)  # a thread inside the store aborts the process at interpreter exit
        if others:
            raise ProcessFailed(others) from error

    def _wait(self, reached: Callable[[], object], limit: float = FAREWELL) -> None:
        until = time.monotonic() + limit
        while not reached() and time.monotonic() < until:
            time.sleep(PERIOD / 5)

    def _lost(self, words: str) -> None:
        """Publish that a process is lost; exit soon unless the main thread leaves the context."""
        if self.heard or self.over.is_set():
            return
        self.heard = words
        if self.rank == 0:
            with suppress(RuntimeError):
                self.store.compare_set(KEY, "", words)
        self._end(words, SOON)

    def _end(self, words: str, patience: float) -> None:
        """Print a reason and exit, unless the main thread leaves the context within `patience` seconds."""
        if not self.over.wait(patience):
            os.write(2, f"failed: {ProcessFailed.__name__}: {words}\n".encode())
            os._exit(1)

    def _listen(self) -> None:
        """Publish this process's last collective and read the failures of others, until the context ends."""
        shown, waited = None, 0.0
        while not self.over.wait(PERIOD):
            # Count periods, not wall time, which goes on while all processes are suspended.
            waited = waited + PERIOD if self.waiting and shown is self.place else 0.0
            try:
                if shown is not self.place:
                    shown = self.place
                    self.store.set(f"at {self.rank}", json.dumps(shown))
                if waited > self.limit:
                    self._name_the_late(*shown)
                if not self.store.check([KEY]):
                    continue
                words = self.store.get(KEY).decode()
            except RuntimeError:  # the store is gone with process 0
                words = f"process 0 of {self.world} (on {self.links.hosts[0]}{GONE}its store does not answer"
            late = LATE in words
            if words.startswith(f"process {self.rank} ") and not late:
                return
            self.heard = self.heard or words
            with suppress(RuntimeError):
                self.store.add("heard", 1)
            if late and self.rank == 0:  # the store ends with this process
                self._wait(lambda: self.store.add("heard", 0) >= self.world)
            # This process hangs, or waits for one that does: end it.
            self._end(words, 0.0 if late else SOON if GONE in words else GRACE)
            return

    def _name_the_late(self, count: int, where: str) -> None:
        """Publish which processes have not reached the collective in which this process waits."""
        keys = [f"at {rank}" for rank in range(self.world)]
        places = [json.loads(self.store.get(key)) if self.store.check([key]) else (0, "") for key in keys]
        late = [
            f"process {rank} (it came last to '{place or 'nothing'}')"
            for rank, (number, place) in enumerate(places)
            if number < count
        ]
        if late:
            words = f"{' and '.join(late)} {LATE} '{where}' within {self.limit:g} s (ddp_timeout)"
            self.store.compare_set(KEY, "", f"process {self.rank} of {self.world} waited in vain: {words}")
