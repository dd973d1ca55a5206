"""Handles SIGTERM and Ctrl-C, so that a run finishes its step and saves before it stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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
