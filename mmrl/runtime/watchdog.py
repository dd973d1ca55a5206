"""Ends all processes of a run when one fails or hangs, so that none waits in a collective for ever.

A process that fails writes the reason into a `TCPStore`; a thread of every other process reads it. If the
main thread is still waiting half a minute later, the process ends with the reason on its standard error. The
same happens when a process that is alive does not come to a collective within a limit.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType

# ---- handles sigterm and ctrl-c, so that a run finishes its step and saves before it stops

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Stop:
    """Signal handler that remembers the first signal."""

    loud: bool
    asked: str = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; raise `KeyboardInterrupt` at the second."""
        name = signal.Signals(number).name
        if self.asked:
            raise KeyboardInterrupt(f"{name} for the second time")
        self.asked = name
        if self.loud:
            # A handler may interrupt a print of the same stream, so this goes to the file itself.
            os.write(2, f"\n{name}: this step is finished and saved; once more to leave at once\n".encode())


@contextmanager
def listening(loud: bool) -> Iterator[Stop]:
    """Take SIGTERM and SIGINT (Ctrl-C) as requests to stop, inside this context.

    Python delivers signals to the main thread only; in other threads this does nothing.
    """
    stop = Stop(loud)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PERIOD = 0.25  # seconds between two reads of the store
GRACE = 30.0  # seconds that a process has to end by itself
FAREWELL = 5.0  # seconds that a failed process waits for the others to read the reason
KEY = "failed"
LATE = "did not come to"  # in the message about a process that hangs


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
        self.rank, self.world, self.known, self.limit = rank, world, known, limit
        self.place = (0, "the beginning")  # number of meetings that this process came to, and the last one
        self.waiting = False
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

    @contextmanager
    def meeting(self, where: str) -> Iterator[None]:
        """Come to a point where this process waits for every other one."""
        self.place, self.waiting = (self.place[0] + 1, where), True
        try:
            yield
        finally:
            self.waiting = False

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
        others = self._reason_of_others()
        if not others:
            self._tell(f"process {self.rank} of {self.world} failed: {kind.__name__}: {error}")
        self.over.set()
        self._rest()
        if others:
            raise ProcessFailed(others) from error

    def _rest(self) -> None:
        """Wait for the listener, since a thread inside the store aborts the process at interpreter exit."""
        self.thread.join(FAREWELL)

    def _leave(self) -> None:
        """Shut down cleanly; rank 0, which hosts the store, leaves last."""
        self.store.add("done", 1)
        if self.rank == 0:
            self._wait_for("done", self.world)
        self.over.set()

    def _tell(self, words: str) -> None:
        try:
            if self.store.compare_set(KEY, "", words).decode() == words:
                self._wait_for("heard", self.world - 1)
        except RuntimeError:  # rank 0 and its store are gone
            return

    def _wait_for(self, name: str, count: int) -> None:
        until = time.monotonic() + FAREWELL
        while self.store.add(name, 0) < count and time.monotonic() < until:
            time.sleep(PERIOD / 5)

    def _reason_of_others(self) -> str:
        """Return the reason of another process; wait a little, a broken collective may be quicker."""
        until = time.monotonic() + 4 * PERIOD
        while not self.heard and time.monotonic() < until:
            time.sleep(PERIOD / 5)
        return self.heard

    def _listen(self) -> None:
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
                words = f"process 0 of {self.world} is gone without a word"
            late = LATE in words
            if words.startswith(f"process {self.rank} ") and not late:
                return
            self.heard = words
            self._acknowledge()
            if late and self.rank == 0:
                self._wait_for("heard", self.world)  # the store goes with this process
            # A process that hangs, or waits for one that does, does not end by itself.
            if not self.over.wait(0.0 if late else GRACE):
                os.write(2, f"failed: {ProcessFailed.__name__}: {words}\n".encode())
                os._exit(1)
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

    def _acknowledge(self) -> None:
        try:
            self.store.add("heard", 1)
        except RuntimeError:
            return
