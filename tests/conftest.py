"""What all tests share: seeds, limits of time, and the same matrix library."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import signal
import time
import zlib
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from mmrl.core import onednn
from tests.support.covering import left_out
from tests.support.quick import draw_curves, draw_few, draw_no_curves, quicken_libraries

LIMIT = 1800  # seconds that a test with its fixtures may take, also on a machine that does other work
MARGIN = 600  # more seconds, until a test ends that hangs outside of Python
# When the files of a folder run, by default 1. Long files first, else one worker works alone at the end.
FOLDERS = {"runtime": 0, "examples": 0, "tests": 0} | dict.fromkeys(
    ("advantages", "config", "core", "data", "kv_cache", "metrics", "objectives", "papers", "rewards", "trl"),
    2,
)
armed = -float("inf")  # when the thread that ends it was started: that takes longer than most tests

quicken_libraries()
collections = 0  # of the oldest generation of objects


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"this test takes more than {LIMIT} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Fail a test that hangs; one that hangs outside of Python ends all, with where each thread is."""
    global armed, collections  # noqa: PLW0603
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT)
    if time.monotonic() - armed > MARGIN / 2:
        armed = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT + MARGIN, exit=True)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        if collections != (collections := gc.get_stats()[2]["collections"]):
            gc.freeze()  # what a full collection has left, imported modules for the most part, stays


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Leave what is collected to no garbage collector: nothing of it goes before the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report that their objects leak
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch by the name of a test before its fixtures, so that its tiny models are always the same."""
    seed = zlib.crc32(item.nodeid.encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # where not, `torch.manual_seed` formats the whole stack, four times
        torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the covering of families leaves out, before `-m` chooses; long files come first."""
    items.sort(key=lambda item: FOLDERS.get(item.path.parent.name, 1))
    named = [item for item in items if "family" in getattr(getattr(item, "callspec", None), "params", ())]
    tests = ((str(one.path), one.originalname, str(one.callspec.params["family"]), one) for one in named)
    for item in left_out(tests):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def few_drawings() -> None:
    """Draw few bootstrap samples and no curves; tests that are about them draw as users do."""
    draw_few()
    draw_no_curves()


@pytest.fixture
def generator() -> torch.Generator:
    """Give a generator that draws the same numbers every time."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves on pages of runs, which other tests do without."""
    draw_curves(monkeypatch)


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave files of tests to the page cache: no test cuts the power, and the disk costs minutes."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def onednn_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on processors where it is slower as well, so that its code is tested there."""
    monkeypatch.setattr(onednn, "FASTER", True)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no page at the end of a run: that takes longer than the training of a toy."""
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder: folder)
