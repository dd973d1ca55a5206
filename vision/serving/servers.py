"""A pool of vLLM servers: weight updates, requests, and retries on other servers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mmrl.core.types import Count
from mmrl.runtime.files import flock
from mmrl.runtime.json_client import PASSING, JsonClient, StatusError, as_json
from mmrl.vision.serving.wire import Answer, WrongAnswer, WrongWeights, answers_of

ADAPTER = "policy-adapter"  # name of the adapter on the servers
HINT = "start it with the line that `mmrl serve-command` prints"
PROBE = 10.0  # seconds until a server must report its version of the weights
LOCK, ASKING = ".lock", ".asking"  # lock files: for weight updates, and for pending requests
TRIES = 3  # maximal tries of a request at each server
PAUSE = 1.0  # seconds before a retry, and between probes while no server answers
log = logging.getLogger("mmrl")


@dataclass(frozen=True)
class Weights:
    """A folder with an adapter or a whole model, which servers load, and its version."""

    folder: Path
    version: str
    adapter: bool


@dataclass(frozen=True)
class Source:
    """Origin of an answer: the address of a server, and how often the server had joined by then."""

    url: str
    joins: int


class Server:
    """One vLLM server, by its address."""

    def __init__(self, url: str, request_timeout: float) -> None:
        self.url, self.request_timeout = url.rstrip("/"), request_timeout
        self.alive, self.pending, self.last_error = True, 0, ""
        self.loaded, self.joins = "", 0  # latest version loaded by this run; how often the server joined
        self.sums: tuple[str, str] = ("", "")  # version (or "base") and hash of its weights
        self.busy, self.since = 0.0, 0.0  # seconds of work, counted up to `since`

    def count(self, more: int) -> None:
        """Add `more` to the number of pending requests; add up the seconds with pending requests."""
        now = time.monotonic()
        self.busy += now - self.since if self.pending else 0.0
        self.since, self.pending = now, self.pending + more

    def version(self) -> str | None:
        """Return the version of the server's weights; None if the server does not answer."""
        try:
            return json.loads(self._at("weight_info", PROBE).get())["weight_version"]
        except StatusError as error:
            if error.status == 404:
                raise RuntimeError(
                    f"the server '{self.url}' does not tell the version of its weights; {HINT}"
                ) from error
            self.last_error = str(error)
        except OSError as error:
            self.last_error = str(error)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"'{self.url}' is no vLLM server of version 0.32: {error!r}") from error
        return None

    def generate(self, request: bytes) -> bytes:
        """Send a request for answers as JSON; raises `ConnectionError` without a response."""
        return self._at("inference/v1/generate", self.request_timeout).post(request)

    def load(self, weights: Weights) -> None:
        """Load weights after all pending requests; clear the caches of keys, values and encoded images."""
        self._post("pause?mode=wait", {})
        try:
            if weights.adapter:
                load = {"lora_name": ADAPTER, "lora_path": str(weights.folder), "load_inplace": True}
                self._post("v1/load_lora_adapter", load)
            else:
                where = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
                self._post("collective_rpc", where)
            for cache in ("prefix", "mm", "encoder"):
                self._post(f"reset_{cache}_cache", {})
            self._post("update_weight_version", {"new_version": weights.version})
        finally:
            self._post("resume", {})

    def checksum(self) -> str:
        """Hash all weights of the server except adapters."""
        sums = json.loads(self._post("weight_checker", {"action": "checksum"}))["checksums"]
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def _post(self, path: str, content: Mapping[str, Any]) -> bytes:
        try:
            return self._at(path, self.request_timeout).post(content)
        except StatusError as error:
            raise RuntimeError(f"the server '{self.url}' took no weights ({error}); {HINT}") from error

    def _at(self, path: str, timeout: float) -> JsonClient:
        return JsonClient(f"{self.url}/{path}", request_timeout=timeout, request_retries=0, wait=0.0)


class Servers:
    """Pool of servers of one model; requests to a dead server go to another server with the same seed.

    Args:
        urls: Addresses of the servers.
        folder: Folder for weights and lock files.
        request_timeout: Seconds until a request must be answered.
        timeout: Seconds to wait for a server while no server is alive.
        parallel: Number of concurrent requests.
    """

    def __init__(
        self, urls: Sequence[str], folder: Path, *, request_timeout: float, timeout: float, parallel: int
    ) -> None:
        self.servers = [Server(url, request_timeout) for url in urls]
        self.folder, self.timeout = folder, timeout
        self.slots = threading.Semaphore(max(parallel, len(self.servers)))
        self.given_up = threading.Event()  # set when pending answers will not be collected
        self.counting = threading.Lock()
        self.weights: Weights | None = None
        self.outstanding = 0  # pending requests
        self.asking: TextIO | None = None  # lock file, locked in shared mode while requests are pending
        self.again, self.seconds = 0, 0.0  # repeated requests, and seconds of weight updates
        self.sent: list[int] = []  # sizes of requests in bytes, without repetitions
        self.since = 0.0  # start of the metrics' period; 0: no request yet

    @property
    def alive(self) -> list[Server]:
        """The servers that answered when they were last contacted."""
        return [server for server in self.servers if server.alive]

    def bring(self, write: Callable[[], Weights]) -> Weights:
        """Write weights with `write`, load them into all living servers, and return them.

        Waits up to `timeout` seconds while no server is alive.
        """
        began = time.monotonic()
        self.since = self.since or began
        with locked(self.folder / LOCK):
            self.weights = weights = write()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            other = {*pool.map(Server.version, self.servers)} - {None, weights.version}
            # Change no weights while any process has pending requests with other weights. Take ASKING first,
            # because a pending request may need the other lock, to load weights into a restarted server.
            with locked(self.folder / ASKING) if other else nullcontext(), locked(self.folder / LOCK):
                list(pool.map(self._join, self.servers))
        self._compare()
        self.seconds += time.monotonic() - began
        if not self.alive:
            self._wait(self.servers, self.given_up)
        return weights

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
                "vllm/request_bytes": sum(self.sent) / max(1, len(self.sent)),
                "vllm/busy_seconds": busy,
                "vllm/idle_seconds": max(0.0, now - (self.since or now) - busy),
            }
            self.again, self.seconds, self.since, self.sent = 0, 0.0, now, []
            for server in self.servers:
                server.busy = 0.0
        return metrics

    def ask(self, uid: str, request: Mapping[str, Any]) -> Future[tuple[list[Answer], Source]]:
        """Send the request for a prompt to a server; weights do not change while it is pending."""
        with self.counting:
            if not self.outstanding:
                self.asking = (self.folder / ASKING).open("a")
                flock(self.asking, fcntl.LOCK_SH)
            self.outstanding += 1
        future: Future[tuple[list[Answer], Source]] = Future()
        future.add_done_callback(self._answered)
        # Daemon threads: Python's exit waits for the threads of a ThreadPoolExecutor.
        work = threading.Thread(target=self._work, args=(future, uid, request, self.given_up), daemon=True)
        work.start()
        return future

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
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._answers(uid, request, given_up))
                except BaseException as error:
                    future.set_exception(error)

    def _answered(self, _: Future) -> None:
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
        written = as_json(request)
        with self.counting:
            self.sent.append(len(written))
        faults: dict[str, list[str]] = {server.url: [] for server in self.servers}
        while able := [server for server in self.servers if len(faults[server.url]) < TRIES]:
            with self._least_busy(able, faults) as server:
                if server is not None:
                    # Pause before a retry, because the fault may pass; a first try gets no pause.
                    pause(PAUSE * len(faults[server.url]), given_up)
                    source = Source(server.url, server.joins)
                    try:
                        data = server.generate(written)
                        return answers_of(data, request, uid, self.weights.version), source
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
        """Check a server that did not answer; raise if the request is at fault."""
        assert self.weights is not None
        log.warning("%s did not answer prompt '%s', which is asked again: %s", server.url, uid, fault)
        with self.counting:
            self.again += 1
        if (has := server.version()) != self.weights.version:  # it died, or was restarted
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
        if has not in (None, wanted, server.loaded):  # it is new, was restarted, or serves other runs too
            server.joins += 1
            server.sums = ("", "")
        if has not in (None, wanted):
            try:
                server.load(self.weights)
                held = "base" if self.weights.adapter else wanted
                if len(self.servers) > 1 and server.sums[0] != held:
                    server.sums = held, server.checksum()
                has = server.version()
            except OSError as error:  # it died during the update
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
        """Choose a living server with the fewest faults, then with the fewest pending requests; else None."""
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
    """Wait for some seconds; raises `ConnectionError` if the answer is not wanted any more."""
    if given_up.wait(seconds):
        raise ConnectionError("the answer was given up, because the run has failed")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other threads and processes inside the context."""
    with path.open("a") as file:
        flock(file, fcntl.LOCK_EX)
        yield
