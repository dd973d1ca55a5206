"""A pool of vLLM servers: weight updates, requests, and retries on other servers."""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from mmrl.core.types import Count
from mmrl.runtime.files import flock
from mmrl.runtime.json_client import PASSING, StatusError
from mmrl.vision.serving.server import HINT, Server, Source, Weights
from mmrl.vision.serving.wire import ECHO, Answer, WrongAnswer, WrongWeights

LOCK, ASKING = ".lock", ".asking"  # lock files: for weight updates, and for pending requests
TRIES = 3  # maximal tries of a request at each server
PAUSE = 1.0  # seconds before a retry, and between probes while no server answers
POLL = 0.05  # seconds between attempts to change weights while another process has pending requests
Answered = Future[tuple[list[Answer], Source]]
Asked = tuple[Answered, str, Mapping[str, Any]]  # a request: (future, prompt uid, content)
log = logging.getLogger("mmrl")


class Servers:
    """Pool of servers of one model; requests to a dead server go to another server with the same seed.

    Args:
        urls: Addresses of the servers.
        folder: Folder for weights and lock files.
        request_timeout: Seconds until a request must be answered.
        timeout: Seconds to wait for a server while no server is alive.
        parallel: Number of concurrent requests.
        sleep_level: Level at which servers sleep between rollouts; 0: they stay awake.
        kind: Class of the servers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        *,
        request_timeout: float,
        timeout: float,
        parallel: int,
        sleep_level: int = 0,
        kind: type[Server] = Server,
    ) -> None:
        self.servers = [kind(url, request_timeout) for url in urls]
        self.folder, self.timeout, self.sleep_level = folder, timeout, sleep_level
        self.slots = threading.Semaphore(max(parallel, len(self.servers)))
        self.given_up = threading.Event()  # set when pending answers are abandoned
        self.counting = threading.Lock()
        self.weights: Weights | None = None  # the latest loaded weights, which all pending requests use
        self.latest: list[Future] = []  # futures of the latest `begin`
        self.outstanding = 0  # number of pending requests
        self.asking: TextIO | None = None  # lock file, locked in shared mode while requests are pending
        self.again, self.seconds = 0, 0.0  # repeated requests, and seconds of weight updates
        self.sleepers: set[str] = set()  # addresses of servers that have slept
        self.published = 0  # bytes of weights sent, summed over servers
        self.sent: list[int] = []  # sizes of requests in bytes, one entry per try
        self.since = 0.0  # start of the metrics' period; 0: no request yet

    @property
    def alive(self) -> list[Server]:
        """The servers that answered when they were last contacted."""
        return [server for server in self.servers if server.alive]

    def begin(
        self, weights: Weights, futures: Sequence[Answered], requests: Callable[[], list[Asked]]
    ) -> Future[None]:
        """Load weights and send requests, in a thread if earlier requests are not answered yet.

        Args:
            weights: The weights. Their folder must stay until the requests are answered.
            futures: The futures of these requests; they fail if loading or an earlier request fails.
            requests: Makes the requests; it may read the answers to all earlier requests.

        Returns:
            A future that is done when the weights are loaded.
        """
        loaded: Future[None] = Future()
        before, self.latest, given_up = self.latest, [loaded, *futures], self.given_up

        def start(earlier: Sequence[Future] = ()) -> None:
            try:
                for future in earlier:
                    future.result()  # raises the error of the earlier requests
                with self._holding(weights, given_up):
                    loaded.set_result(None)
                    self._send(requests(), given_up)
            except BaseException as error:
                for future in (loaded, *futures):
                    if not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        if all(future.done() for future in before):
            start()
        else:
            threading.Thread(target=start, args=(before,), daemon=True).start()
        return loaded

    @contextmanager
    def _holding(self, weights: Weights, given_up: threading.Event) -> Iterator[None]:
        """Load weights into all living servers, and lock the servers' weights inside the context.

        Retries if another learner, such as an evaluation, loads its weights between `bring` and the lock.
        """
        while True:
            self.bring(weights, given_up)
            with (self.folder / ASKING).open("a") as asking:
                flock(asking, fcntl.LOCK_SH)
                if {server.version() for server in self.alive} <= {None, weights.version}:
                    yield
                    return

    def bring(self, weights: Weights, given_up: threading.Event) -> None:
        """Load weights into all living servers; wait up to `timeout` seconds while no server is alive."""
        pause(0.0, given_up)
        began = time.monotonic()
        self.since, self.weights = self.since or began, weights
        with ThreadPoolExecutor(len(self.servers)) as pool, (self.folder / ASKING).open("a") as asking:
            # Do not change weights while requests for other weights are pending in any process. Take the lock
            # ASKING first: a pending request may need LOCK, to load weights into a restarted server.
            while {*pool.map(lambda server: server.version(), self.servers)} - {None, weights.version}:
                try:
                    flock(asking, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # poll: if its holder loads the same weights, no lock is needed
                    pause(POLL, given_up)
            with locked(self.folder / LOCK):
                list(pool.map(self._join, self.servers))
        self._compare()
        with self.counting:
            self.seconds += time.monotonic() - began
        if not self.alive:
            self._wait(self.servers, given_up)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; seconds of work are averaged over servers."""
        now = time.monotonic()
        with self.counting:
            for server in self.servers:
                server.count(0)
            busy = sum(server.busy for server in self.servers) / len(self.servers)
            metrics = {
                "vllm/servers": float(len(self.alive)),
                "vllm/asked_again": Count(self.again),
                "vllm/publish_seconds": self.seconds,
                "vllm/publish_bytes": Count(self.published),
                "vllm/request_bytes": sum(self.sent) / max(1, len(self.sent)),
                "vllm/busy_seconds": busy,
                "vllm/idle_seconds": max(0.0, now - (self.since or now) - busy),
            }
            self.again, self.published, self.seconds, self.since, self.sent = 0, 0, 0.0, now, []
            for server in self.servers:
                server.busy = 0.0
        return metrics

    def ask(self, uid: str, request: Mapping[str, Any]) -> Answered:
        """Send the request for a prompt to a server; weights do not change while it is pending."""
        future: Answered = Future()
        self._send([(future, uid, request)], self.given_up)
        return future

    def _send(self, requests: Sequence[Asked], given_up: threading.Event) -> None:
        with self.counting:
            if requests and not self.outstanding:
                self.asking = (self.folder / ASKING).open("a")
                flock(self.asking, fcntl.LOCK_SH)
                self._wake_up(self.alive)  # while the lock is held, `rest` lets them stay awake
            self.outstanding += len(requests)
        for future, uid, request in requests:
            # Use daemon threads, because the threads of a ThreadPoolExecutor would delay Python's exit.
            work = threading.Thread(target=self._work, args=(future, uid, request, given_up), daemon=True)
            work.start()

    def rest(self) -> None:
        """Let all servers sleep at `sleep_level`, unless any process has pending requests."""
        if not self.sleep_level:
            return
        with locked(self.folder / LOCK), (self.folder / ASKING).open("a") as asking:
            try:
                flock(asking, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # the last process with pending requests calls `rest` again
            for server in self.alive:
                try:
                    self._send_to_sleep(server)
                except OSError as error:  # the server died, which later requests handle
                    server.alive, server.last_error = False, str(error)

    def _send_to_sleep(self, server: Server) -> None:
        server.sleep(self.sleep_level)
        if server.url not in self.sleepers:
            if ["cpu"] in server.call_workers("device_type"):
                log.warning("%s runs on a CPU, where vLLM releases no memory in its sleep", server.url)
            self.sleepers.add(server.url)

    def _wake_up(self, servers: Sequence[Server]) -> None:
        """Wake servers up; ignore dead ones, which the next request detects."""
        for server in servers if self.sleep_level else ():
            with suppress(OSError):
                server.wake_up()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Cancel all unsent requests if the code inside the context raises an error."""
        try:
            yield
        except BaseException:
            given_up, self.given_up = self.given_up, threading.Event()
            given_up.set()
            raise

    def _work(self, future: Future, uid: str, request: Mapping[str, Any], given_up: threading.Event) -> None:
        with self.slots:
            if given_up.is_set():
                future.cancel()
            finish = None
            if future.set_running_or_notify_cancel():
                try:
                    finish = partial(future.set_result, self._answers(uid, request, given_up))
                except BaseException as error:
                    finish = partial(future.set_exception, error)
            self._answered()  # before anybody sees the result, so that `rest` finds no lock
            if finish:
                finish()

    def _answered(self) -> None:
        with self.counting:
            self.outstanding -= 1
            if not self.outstanding and self.asking:
                self.asking.close()  # closing the file unlocks it

    def _answers(
        self, uid: str, request: Mapping[str, Any], given_up: threading.Event
    ) -> tuple[list[Answer], Source]:
        """Send a request to one server after another until one answers, at most `TRIES` times to each.

        Raises `WrongAnswer` for an answer to another request, `ConnectionError` if no server answers.
        """
        assert self.weights is not None
        sent = {name: value for name, value in request.items() if name != ECHO}
        faults: dict[str, list[str]] = {server.url: [] for server in self.servers}
        while able := [server for server in self.servers if len(faults[server.url]) < TRIES]:
            with self._least_busy(able, faults) as server:
                if server is not None:
                    # Pause before a retry, because the fault may be temporary.
                    pause(PAUSE * len(faults[server.url]), given_up)
                    source = Source(server.url, server.joins)
                    try:
                        data = server.ask(sent, self.sent)
                        return server.answers(data, request, uid, self.weights.version), source
                    except (OSError, WrongWeights) as error:
                        fault, server.last_error = error, str(error)
                        faults[server.url].append(str(error))
            if server is not None:
                self._look_at(server, fault, uid)
            else:
                self._wait(able, given_up)
        errors = "; ".join(listed[-1] for listed in faults.values())
        raise ConnectionError(f"no server answers prompt '{uid}', asked {TRIES} times each: {errors}")

    def _look_at(self, server: Server, fault: Exception, uid: str) -> None:
        """Check the state of a server that failed; raise `WrongAnswer` if the request is at fault."""
        assert self.weights is not None
        log.warning("%s did not answer prompt '%s', which is asked again: %s", server.url, uid, fault)
        with self.counting:
            self.again += 1
        if (has := server.version()) != self.weights.version:  # dead, or restarted with other weights
            server.alive = has is not None
            if has is not None:
                with locked(self.folder / LOCK):
                    self._join(server)
                self._compare()
        elif isinstance(fault, StatusError) and fault.status not in PASSING:
            hint = f"; {HINT}" if fault.status == 404 else ""
            raise WrongAnswer(f"the server refuses prompt '{uid}': {fault}{hint}") from fault

    def _join(self, server: Server) -> None:
        """Load the weights into a server, unless it does not answer or already has them."""
        assert self.weights is not None
        wanted, has = self.weights.version, server.version()
        if has not in (None, wanted, server.loaded):  # new, restarted, or loaded by another run
            server.joins += 1
            server.sums = ("", "")
        if has not in (None, wanted):
            try:
                self._wake_up([server])
                server.load(self.weights)
                self.published += self.weights.size
                held = "base" if self.weights.adapter else wanted
                if len(self.servers) > 1 and server.sums[0] != held:
                    server.sums = held, server.checksum()
                has = server.version()
            except OSError as error:  # the server died during the update
                server.last_error, has = str(error), None
        if has not in (None, wanted):
            raise RuntimeError(f"'{server.url}' has the weights '{has}' after it was brought '{wanted}'")
        server.alive, server.loaded = has is not None, has or server.loaded

    def _compare(self) -> None:
        """Raise RuntimeError if the known hashes of the servers' weights differ."""
        hashes = {server.sums for server in self.alive if server.sums[0]}
        newest = "base" if self.weights and self.weights.adapter else self.weights and self.weights.version
        if len({sums for held, sums in hashes if held == newest}) > 1:
            urls = ", ".join(server.url for server in self.alive)
            raise RuntimeError(f"the servers {urls} hold different weights; do all serve the policy's model?")

    @contextmanager
    def _least_busy(
        self, able: Sequence[Server], faults: Mapping[str, Sequence[str]]
    ) -> Iterator[Server | None]:
        """Yield the living server with the fewest faults, then fewest pending requests; None without one."""
        with self.counting:
            living = [server for server in able if server.alive]
            server = min(living, key=lambda server: (len(faults[server.url]), server.pending), default=None)
            if server:
                server.count(1)
        try:
            yield server
        finally:
            if server:
                with self.counting:
                    server.count(-1)

    def _wait(self, able: Sequence[Server], given_up: threading.Event) -> None:
        """Wait until one of the servers `able` answers, and load the weights into it.

        Raises `ConnectionError` after `timeout` seconds.
        """
        end = time.monotonic() + self.timeout
        while not any(server.alive for server in able):
            with locked(self.folder / LOCK):
                for server in able:
                    self._join(server)
            if any(server.alive for server in able):
                self._compare()
            elif time.monotonic() > end:
                other = "" if len(able) == len(self.servers) else "other "
                errors = "; ".join(server.last_error for server in self.servers)
                raise ConnectionError(
                    f"no {other}server was alive for `timeout: {self.timeout:g}` seconds: {errors}"
                )
            else:
                pause(PAUSE, given_up)


def pause(seconds: float, given_up: threading.Event) -> None:
    """Wait for some seconds; raises `ConnectionError` if the answer is no longer wanted."""
    if given_up.wait(seconds):
        raise ConnectionError("the answer was given up, because the run has failed")


@contextmanager
def locked(path: Path, how: int = 0) -> Iterator[None]:
    """Lock a file against other threads and processes inside the context.

    Raises `BlockingIOError` if `how` is LOCK_NB and the file is locked.
    """
    with path.open("a") as file:
        flock(file, fcntl.LOCK_EX | how)
        yield
