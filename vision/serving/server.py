"""One vLLM server, and the weights that it loads."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mmrl.runtime.json_client import JsonClient, StatusError
from mmrl.vision.serving.agreement import CAUSES
from mmrl.vision.serving.media_sent import MediaSent
from mmrl.vision.serving.wire import Answer, answers_of

ADAPTER = "policy-adapter"  # name of the adapter on the servers
HINT = "start it with the line that `mmrl serve-command` prints"
LOADING = "loading"  # version of a server while its weights change
PROBE = 10.0  # seconds until a server must report its version of the weights


@dataclass(frozen=True)
class Weights:
    """A folder with an adapter or a whole model, which servers load, and its version."""

    folder: Path
    version: str
    adapter: bool

    @property
    def size(self) -> int:
        """Size of the weights in bytes."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def load_into(self, server: Server) -> None:
        """Let a paused server load the folder of weights."""
        if self.adapter:
            server.load_adapter(str(self.folder))
        else:
            server.call_workers("reload_weights", weights_path=str(self.folder))


@dataclass(frozen=True)
class Source:
    """Origin of an answer: server address, and the number of times that the server has joined the pool."""

    url: str
    joins: int


class Server:
    """A vLLM server at an address; subclasses implement other kinds of servers."""

    title: ClassVar[str] = "vLLM server of version 0.32"
    info: ClassVar[str] = "weight_info"  # path that returns the version of the weights
    route: ClassVar[str] = "inference/v1/generate"  # path of requests for answers
    causes: ClassVar[Mapping[str, str]] = CAUSES  # likely causes if answers differ from the policy's

    def __init__(self, url: str, request_timeout: float) -> None:
        self.url, self.request_timeout = url.rstrip("/"), request_timeout
        self.alive, self.pending, self.last_error = True, 0, ""
        self.loaded, self.joins = "", 0  # latest version loaded by this run; how often the server joined
        self.sums: tuple[str, str] = ("", "")  # version (or "base") and hash of its weights
        self.busy, self.since = 0.0, 0.0  # seconds with pending requests, counted up to `since`
        self.media = MediaSent()

    def count(self, more: int) -> None:
        """Add `more` to the number of pending requests, and update the seconds with pending requests."""
        now = time.monotonic()
        self.busy += now - self.since if self.pending else 0.0
        self.since, self.pending = now, self.pending + more

    def version(self) -> str | None:
        """Return the version of the server's weights; None if the server does not answer."""
        try:
            return self.parse_version(json.loads(self._at(self.info, PROBE).get()))
        except StatusError as error:
            if error.status == 404:
                raise RuntimeError(
                    f"the server '{self.url}' does not tell the version of its weights; {HINT}"
                ) from error
            self.last_error = str(error)
        except OSError as error:
            self.last_error = str(error)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"'{self.url}' is no {self.title}: {error!r}") from error
        return None

    def generate(self, request: bytes) -> bytes:
        """Send a request for answers as JSON; raises `ConnectionError` without a response."""
        return self._at(self.route, self.request_timeout).post(request)

    def ask(self, request: Mapping[str, Any], sizes: list[int]) -> bytes:
        """Send a request for answers, without media that the server already has; see `MediaSent`."""
        info = self._at("server_info?config_format=json", self.request_timeout)
        return self.media.ask(request, self.generate, info.get, sizes)

    def answers(self, data: bytes, request: Mapping[str, Any], uid: str, version: str) -> list[Answer]:
        """Parse the answers to a request; raise `WrongAnswer` if they do not belong to the request."""
        return answers_of(data, request, uid, version)

    def parse_version(self, info: Any) -> str:
        """Return the version of the weights from the server's reply at the path `info`."""
        return info["weight_version"]

    def load(self, weights: Weights) -> None:
        """Wait for pending requests, load weights, and clear the caches of keys, values and images."""
        self.post("pause?mode=wait", {})
        try:
            self.post("update_weight_version", {"new_version": LOADING})  # a crash now forces a reload
            weights.load_into(self)
            for cache in ("prefix", "mm", "encoder"):
                self.post(f"reset_{cache}_cache", {})
            self.media.forget()
            self.post("update_weight_version", {"new_version": weights.version})
        finally:
            self.post("resume", {})

    def load_adapter(self, folder: str) -> None:
        """Load an adapter from a folder that the server can read, in place of the previous adapter."""
        self.post("v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": folder, "load_inplace": True})

    def call_workers(self, method: str, **options: Any) -> list[Any]:
        """Call a method of every worker of the server; return the results."""
        reply = self.post("collective_rpc", {"method": method, "kwargs": options})
        return json.loads(reply)["results"] if reply else []

    def num_workers(self) -> int:
        """Return the number of processes that hold the model."""
        return int(json.loads(self._at("get_world_size", PROBE).get())["world_size"])

    def sleep(self, level: int) -> None:
        """Release memory until `wake_up`. Level 1: keys and values; level 2: also the weights."""
        if level == 2:
            self.post("update_weight_version", {"new_version": LOADING})  # so that weights are reloaded
            self.loaded = LOADING
        self.post(f"sleep?level={level}&mode=wait", {})
        self.media.forget()

    def wake_up(self) -> None:
        """End `sleep`; does nothing to a server that is awake."""
        self.post("wake_up", {})

    def checksum(self) -> str:
        """Hash all weights of the server except adapters."""
        sums = json.loads(self.post("weight_checker", {"action": "checksum"}))["checksums"]
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def post(self, path: str, content: Mapping[str, Any]) -> bytes:
        """Send a request about weights; raises RuntimeError if the server refuses it."""
        try:
            return self._at(path, self.request_timeout).post(content)
        except StatusError as error:
            what = path.partition("?")[0]
            wrong = f"cannot {what}" if what in ("sleep", "wake_up") else "took no weights"
            raise RuntimeError(f"the server '{self.url}' {wrong} ({error}); {HINT}") from error

    def _at(self, path: str, timeout: float) -> JsonClient:
        return JsonClient(f"{self.url}/{path}", request_timeout=timeout, request_retries=0, wait=0.0)
