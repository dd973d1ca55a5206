"""Being asked to stop: a run that gets a signal finishes its step, saves, and leaves in good order."""

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
    """Whether somebody asked, and how."""

    loud: bool
    asked: str = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; a second one leaves at once."""
        name = signal.Signals(number).name
        if self.asked:
            raise KeyboardInterrupt(f"{name} for the second time")
        self.asked = name
        if self.loud:
            # A handler may interrupt a print of the same stream, so this goes to the file itself.
            os.write(2, f"\n{name}: this step is finished and saved; once more to leave at once\n".encode())


@contextmanager
def listening(loud: bool) -> Iterator[Stop]:
    """Take SIGTERM and SIGINT (Ctrl-C) as a wish to stop, while a block runs.

    Python hands signals to the main thread only; elsewhere nobody is listened to.
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
