"""Ends all processes of a run when one fails, hangs or is gone, so that none waits in a collective for ever.

A process that fails writes the reason into a `TCPStore`; a thread of every other process reads it. If the
main thread is still waiting half a minute later, the process ends with the reason on its standard error. The
same happens when a process that is alive does not come to a collective within a limit, and sooner when one is
killed or its machine cannot be reached.
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
GRACE = 30.0  # seconds that a process has to end by itself
SOON = 5.0  # seconds that it has where another process is gone, which nothing will bring back
FAREWELL = 5.0  # seconds that a failed process waits for the others to read the reason
KEY = "failed"
LATE = "did not come to"  # in the message about a process that hangs
GONE = ") is gone: "  # in the message about one that was killed


@dataclass
class Stop:
    """The first signal that asked a run to stop, by name; empty until there is one."""

    asked: str = ""


@contextmanager
def listening(loud: bool) -> Iterator[Stop]:
    """Take SIGTERM and SIGINT (Ctrl-C) as requests to stop, inside this context.

    The second one interrupts. Python delivers signals to the main thread only; in other threads this does
    nothing.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.asked:
            raise KeyboardInterrupt(f"{name} for the second time")
        stop.asked = name
        if loud:
            # A handler may interrupt a print of the same stream, so this goes to the file itself.
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
    """Another process failed, and this one cannot go on without it."""


class Watch:
    """Exchanges failures with the other processes inside this context.

    Its own failure is sent unless all know it (`known`). No process is waited for longer than `limit`
    seconds.
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
        self.place = (0, "the beginning")  # number of meetings that this process came to, and the last one
        self.waiting = False
        self.stays = 0  # of other processes for process 0, so far
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
        """Come to a point where this process waits for every other one."""
        self.place, self.waiting = (self.place[0] + 1, where), True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def waiting_for_main(self) -> Iterator[None]:
        """Wait at the end of this context for process 0, without a limit of time."""
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
            if self.rank == 0:  # it hosts the store, so it leaves last
                self._wait(lambda: self.store.add("done", 0) >= self.world)
        else:
            self._wait(lambda: self.heard, 4 * PERIOD)  # a broken collective may be quicker than the reason
            others = self.heard
            if not others:
                words = f"process {self.rank} of {self.world} failed: {type(error).__name__}: {error}"
                with suppress(RuntimeError):  # rank 0 and its store are gone
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
        """Tell all that are left that a process is gone, and end soon where the main thread waits for it."""
        if self.heard or self.over.is_set():
            return
        self.heard = words
        if self.rank == 0:
            with suppress(RuntimeError):
                self.store.compare_set(KEY, "", words)
        self._end(words, SOON)

    def _end(self, words: str, patience: float) -> None:
        """End this process with words, unless its main thread ends by itself within some seconds."""
        if not self.over.wait(patience):
            os.write(2, f"failed: {ProcessFailed.__name__}: {words}\n".encode())
            os._exit(1)

    def _listen(self) -> None:
        """Publish where this process is, and read failures of others, until the context is over."""
        shown, waited = None, 0.0
        while not self.over.wait(PERIOD):
            # Periods are counted instead of time, which goes on while all processes are suspended together.
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
            if late and self.rank == 0:  # the store goes with this process
                self._wait(lambda: self.store.add("heard", 0) >= self.world)
            # A process that hangs, or waits for one that does, does not end by itself.
            self._end(words, 0.0 if late else SOON if GONE in words else GRACE)
            return

    def _name_the_late(self, count: int, where: str) -> None:
        """Send the processes that have not come to where this one waits, if there are any."""
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
