"""vLLM servers with the weights of the policy: bringing them weights, and asking those that live."""

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
PROBE = 10.0  # seconds within which a server says which weights it has
LOCK, ASKING = ".lock", ".asking"  # held while servers are brought weights, and while they answer
TRIES = 3  # of a request at each server
PAUSE = 1.0  # seconds before a server is asked again, and between two looks at servers of which none answers
log = logging.getLogger("mmrl")


@dataclass(frozen=True)
class Weights:
    """Weights as a folder that the servers read: an adapter, or a whole model, and their version."""

    folder: Path
    version: str
    adapter: bool


@dataclass(frozen=True)
class Source:
    """Where an answer comes from: the address of a server, and how often it had joined by then."""

    url: str
    joins: int


class Server:
    """One vLLM server, by its address."""

    def __init__(self, url: str, request_timeout: float) -> None:
        self.url, self.request_timeout = url.rstrip("/"), request_timeout
        self.alive, self.asked, self.last_words = True, 0, ""
        self.brought, self.joins = "", 0  # the version it was brought last, and how often it had another
        self.sums: tuple[str, str] = ("", "")  # what they are of, and the hash of its weights
        self.busy, self.since = 0.0, 0.0  # seconds of work, up to this moment

    def count(self, more: int) -> None:
        """Count requests that are under way, and the seconds in which there are any."""
        now = time.monotonic()
        self.busy += now - self.since if self.asked else 0.0
        self.since, self.asked = now, self.asked + more

    def version(self) -> str | None:
        """Ask which weights the server has; None where it does not answer."""
        try:
            return json.loads(self._at("weight_info", PROBE).get())["weight_version"]
        except StatusError as error:
            if error.status == 404:
                raise RuntimeError(
                    f"the server '{self.url}' does not tell the version of its weights; {HINT}"
                ) from error
            self.last_words = str(error)
        except OSError as error:
            self.last_words = str(error)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"'{self.url}' is no vLLM server of version 0.32: {error!r}") from error
        return None

    def generate(self, request: bytes) -> bytes:
        """Ask for answers by JSON; raises `ConnectionError` where none come."""
        return self._at("inference/v1/generate", self.request_timeout).post(request)

    def load(self, weights: Weights) -> None:
        """Bring the server weights, when it has answered what it was asked.

        What it has computed with other weights is forgotten: keys and values, and images that were encoded.
        """
        self._tell("pause?mode=wait", {})
        try:
            if weights.adapter:
                load = {"lora_name": ADAPTER, "lora_path": str(weights.folder), "load_inplace": True}
                self._tell("v1/load_lora_adapter", load)
            else:
                where = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
                self._tell("collective_rpc", where)
            for cache in ("prefix", "mm", "encoder"):
                self._tell(f"reset_{cache}_cache", {})
            self._tell("update_weight_version", {"new_version": weights.version})
        finally:
            self._tell("resume", {})

    def checksum(self) -> str:
        """Hash all weights that the server has, but those of adapters."""
        sums = json.loads(self._tell("weight_checker", {"action": "checksum"}))["checksums"]
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def _tell(self, path: str, content: Mapping[str, Any]) -> bytes:
        try:
            return self._at(path, self.request_timeout).post(content)
        except StatusError as error:
            raise RuntimeError(f"the server '{self.url}' took no weights ({error}); {HINT}") from error

    def _at(self, path: str, timeout: float) -> JsonClient:
        return JsonClient(f"{self.url}/{path}", request_timeout=timeout, request_retries=0, wait=0.0)


class Servers:
    """Several servers of the same model. What one that dies was asked is asked of another with the same seed.

    Args:
        urls: Their addresses.
        folder: Where weights are written for them.
        request_timeout: Seconds within which a request must be answered.
        timeout: Seconds to wait for a server where none is alive.
        parallel: Requests that are under way at the same time.
    """

    def __init__(
        self, urls: Sequence[str], folder: Path, *, request_timeout: float, timeout: float, parallel: int
    ) -> None:
        self.servers = [Server(url, request_timeout) for url in urls]
        self.folder, self.timeout = folder, timeout
        self.slots = threading.Semaphore(max(parallel, len(self.servers)))
        self.given_up = threading.Event()  # set where nobody will collect what was asked so far
        self.counting = threading.Lock()
        self.weights: Weights | None = None
        self.outstanding = 0  # requests that were begun
        self.asking: TextIO | None = None  # is locked, shared with other processes, while there are any
        self.again, self.seconds = 0, 0.0  # requests that were asked again, and time to bring weights
        self.sent: list[int] = []  # bytes of requests, each counted once
        self.since = 0.0  # from when times count; 0: nothing was asked yet

    @property
    def alive(self) -> list[Server]:
        """The servers that answered when they were last asked."""
        return [server for server in self.servers if server.alive]

    def bring(self, write: Callable[[], Weights]) -> Weights:
        """Make all servers that live have the weights that `write` writes, and return them.

        Waits where none lives, at most `timeout` seconds.
        """
        began = time.monotonic()
        self.since = self.since or began
        with locked(self.folder / LOCK):
            self.weights = weights = write()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            other = {*pool.map(Server.version, self.servers)} - {None, weights.version}
            # No weights are changed while answers with others are under way, in any process. This lock comes
            # first: who asks may have to take the other, for a server that was started again.
            with locked(self.folder / ASKING) if other else nullcontext(), locked(self.folder / LOCK):
                list(pool.map(self._join, self.servers))
        self._compare()
        self.seconds += time.monotonic() - began
        if not self.alive:
            self._wait(self.servers, self.given_up)
        return weights

    def take(self) -> dict[str, float]:
        """Return metrics since the last call; seconds of work are averaged over servers."""
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
        """Begin to ask a server for the answers to a prompt; weights stay until they are there."""
        with self.counting:
            if not self.outstanding:
                self.asking = (self.folder / ASKING).open("a")
                flock(self.asking, fcntl.LOCK_SH)
            self.outstanding += 1
        future: Future[tuple[list[Answer], Source]] = Future()
        future.add_done_callback(self._answered)
        # At its end Python waits for all that a ThreadPoolExecutor was given, but not for daemons.
        work = threading.Thread(target=self._work, args=(future, uid, request, self.given_up), daemon=True)
        work.start()
        return future

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Give up what was asked where the block fails: requests that wait are not sent any more."""
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
                self.asking.close()  # which unlocks it

    def _answers(
        self, uid: str, request: Mapping[str, Any], given_up: threading.Event
    ) -> tuple[list[Answer], Source]:
        """Ask one server after another until one answers, each `TRIES` times at most.

        Raises `WrongAnswer` for an answer to something else, `ConnectionError` where no server answers.
        """
        assert self.weights is not None
        written = as_json(request)
        with self.counting:
            self.sent.append(len(written))
        faults: dict[str, list[str]] = {server.url: [] for server in self.servers}
        while able := [server for server in self.servers if len(faults[server.url]) < TRIES]:
            with self._least_busy(able, faults) as server:
                if server is not None:
                    # What is wrong with a server may be over soon; one that did not fail is asked at once.
                    pause(PAUSE * len(faults[server.url]), given_up)
                    source = Source(server.url, server.joins)
                    try:
                        data = server.generate(written)
                        return answers_of(data, request, uid, self.weights.version), source
                    except (OSError, WrongWeights) as error:
                        fault, server.last_words = error, str(error)
                        faults[server.url].append(str(error))
            if server is not None:
                self._look_at(server, fault, uid)
            else:
                self._wait(able, given_up)
        words = "; ".join(words[-1] for words in faults.values())
        raise ConnectionError(f"no server answers prompt '{uid}', asked {TRIES} times each: {words}")

    def _look_at(self, server: Server, fault: Exception, uid: str) -> None:
        """Find out why a server did not answer; raise where another one would not either."""
        assert self.weights is not None
        log.warning("%s did not answer prompt '%s', which is asked again: %s", server.url, uid, fault)
        with self.counting:
            self.again += 1
        if (has := server.version()) != self.weights.version:  # it died, or was started again
            server.alive = has is not None
            if has is not None:
                with locked(self.folder / LOCK):
                    self._join(server)
                self._compare()
        elif isinstance(fault, StatusError) and fault.status not in PASSING:
            hint = f"; {HINT}" if fault.status == 404 else ""
            raise WrongAnswer(f"the server refuses prompt '{uid}': {fault}{hint}") from fault

    def _join(self, server: Server) -> None:
        """Bring a server that lives the weights, if it has others."""
        assert self.weights is not None
        wanted, has = self.weights.version, server.version()
        if has not in (None, wanted, server.brought):  # it is new, was started again, or serves others too
            server.joins += 1
            server.sums = ("", "")
        if has not in (None, wanted):
            try:
                server.load(self.weights)
                held = "base" if self.weights.adapter else wanted
                if len(self.servers) > 1 and server.sums[0] != held:
                    server.sums = held, server.checksum()
                has = server.version()
            except OSError as error:  # it died while it loaded them
                server.last_words, has = str(error), None
        if has not in (None, wanted):
            raise RuntimeError(f"'{server.url}' has the weights '{has}' after it was brought '{wanted}'")
        server.alive, server.brought = has is not None, has or server.brought

    def _compare(self) -> None:
        """Raise unless all servers hold the same weights, as far as they were asked."""
        known = {server.sums for server in self.alive if server.sums[0]}
        newest = "base" if self.weights and self.weights.adapter else self.weights and self.weights.version
        if len({sums for held, sums in known if held == newest}) > 1:
            urls = ", ".join(server.url for server in self.alive)
            raise RuntimeError(f"the servers {urls} hold different weights; do all serve the policy's model?")

    @contextmanager
    def _least_busy(
        self, able: Sequence[Server], faults: Mapping[str, Sequence[str]]
    ) -> Iterator[Server | None]:
        """Choose the living server that failed least often, and of those the one that is asked least."""
        with self.counting:
            living = [server for server in able if server.alive]
            server = min(living, key=lambda server: (len(faults[server.url]), server.asked), default=None)
            if server:
                server.count(1)
        try:
            yield server
        finally:
            if server:
                with self.counting:
                    server.count(-1)

    def _wait(self, able: Sequence[Server], given_up: threading.Event) -> None:
        """Wait until one of some servers is back, and bring it the weights.

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
                words = "; ".join(server.last_words for server in self.servers)
                raise ConnectionError(
                    f"no {other}server was alive for `timeout: {self.timeout:g}` seconds: {words}"
                )
            else:
                pause(PAUSE, given_up)


def pause(seconds: float, given_up: threading.Event) -> None:
    """Wait for some seconds; raises `ConnectionError` where nobody waits for the answer any more."""
    if given_up.wait(seconds):
        raise ConnectionError("the answer was given up, because the run has failed")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other threads and processes inside the block."""
    with path.open("a") as file:
        flock(file, fcntl.LOCK_EX)
        yield
