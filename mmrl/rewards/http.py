"""Rewards computed by another machine, over HTTP; only JSON is exchanged, never code."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt

LARGEST = 64 << 20  # bytes of an answer
PASSING = {408, 425, 429, 500, 502, 503, 504}  # states of a server that may be over soon


@reward
class Http:
    """Ask a server for rewards, by POST requests of JSON.

    Sent is `{"outcomes": [...]}`. An outcome has "uid", "prompt", "target" and "columns" of its prompt, and
    "text", "tags", "end" and "recorded" of its own; an "image" is a PNG in base64, a "video" a list of
    those with "times" in seconds. Expected is `{"rewards": [...]}`, a finite number or null for each, in at
    most 64 MiB. Redirects are not followed, and proxies not used. `timeout`, `retries` and `on_error` apply
    to the round as a whole, as for any reward.

    Args:
        url: Address of the server, http:// or https://.
        batch: Outcomes per request.
        parallel: Concurrent requests.
        request_timeout: Seconds within which the whole answer to a request must arrive.
        request_retries: Times a request is sent again, after a timeout or where the server is busy or
            broken.
        wait: Seconds before the first retry; they double each time.
    """

    def __init__(
        self,
        *,
        url: str,
        batch: PositiveInt = 64,
        parallel: PositiveInt = 4,
        request_timeout: PositiveFloat = 60.0,
        request_retries: NonNegativeInt = 2,
        wait: NonNegativeFloat = 0.5,
    ) -> None:
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            raise ValueError(f"`url` must be http:// or https:// and a host, not '{url}'")
        self.url, self.batch, self.parallel = url, batch, parallel
        self.request_timeout, self.request_retries, self.wait = request_timeout, request_retries, wait

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        encoded = [_to_json(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        parts = [encoded[at : at + self.batch] for at in range(0, len(encoded), self.batch)]
        with ThreadPoolExecutor(self.parallel) as pool:
            return [value for values in pool.map(self._ask, parts) for value in values]

    def _ask(self, part: list[dict[str, Any]]) -> list[float | None]:
        body = json.dumps({"outcomes": part}, allow_nan=False).encode()
        for left in reversed(range(1 + self.request_retries)):
            try:
                status, reason, data = self._send(body)
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise ConnectionError(
                        f"'{self.url}' does not answer within {self.request_timeout:g} s, asked "
                        f"{1 + self.request_retries} times: {error}"
                    ) from error
            else:
                if status == 200:
                    return self._read(data, len(part))
                if status not in PASSING or not left:
                    message = data[:300].decode(errors="replace").strip()
                    raise ConnectionError(f"'{self.url}' answered with {status} {reason}: {message}")
            # wait, 2 wait, 4 wait, ...
            time.sleep(self.wait * 2 ** (self.request_retries - left))
        raise AssertionError("the last try returns or raises")

    def _send(self, body: bytes) -> tuple[int, str, bytes]:
        """Send one request; return status, reason and body of the response."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.request_timeout)
        deadline = time.monotonic() + self.request_timeout
        connection.connect()
        stream = connection.sock  # the connection forgets it when the response ends

        def cut() -> None:
            with contextlib.suppress(OSError):  # it ended by itself
                # Its own `shutdown` would take the encryption off under the thread that reads.
                socket.socket.shutdown(stream, socket.SHUT_RDWR)

        # The limit of a socket is that of one piece of data, and a server may send a byte at a time.
        watch = threading.Timer(deadline - time.monotonic(), cut)
        watch.daemon = True
        watch.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"Content-Type": "application/json", "Accept": "application/json"}
            connection.request("POST", target, body, {**headers, "Connection": "close"})
            reply = connection.getresponse()
            reason, data = reply.reason, reply.read(LARGEST + 1)
            if reply.length and len(data) <= LARGEST:
                raise http.client.IncompleteRead(data, reply.length)
        except (OSError, http.client.HTTPException) as error:
            raise (TimeoutError("timed out") if time.monotonic() >= deadline else error) from error
        finally:
            watch.cancel()
            connection.close()
        if time.monotonic() >= deadline:  # what was read ends where the watch cut it
            raise TimeoutError("timed out")
        if 300 <= reply.status < 400:
            reason += f" to '{reply.headers.get('Location')}', which is not followed; name it as `url`"
        return reply.status, reason, data

    def _read(self, data: bytes, count: int) -> list[float | None]:
        """Parse a response; anything but JSON of the agreed form is an error."""
        if len(data) > LARGEST:
            raise ValueError(f"'{self.url}' answered with more than {LARGEST} bytes for {count} outcomes")
        try:
            values = json.loads(data)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(
                f"'{self.url}' must answer with JSON {{\"rewards\": [...]}}, not {data[:120]!r}"
            ) from None
        if type(values) is not list or len(values) != count:
            raise ValueError(f"'{self.url}' gave {str(values)[:120]} for {count} outcomes")
        for value in values:
            # Whole numbers that no float holds are larger than the largest one; NaN is never smaller.
            if value is not None and not (type(value) in (int, float) and abs(value) <= sys.float_info.max):
                shown = repr(value)[:120]
                raise ValueError(f"'{self.url}' gave the reward {shown}, not a finite number or null")
        return [None if value is None else float(value) for value in values]


def _to_json(prompt: Prompt, outcome: Outcome) -> dict[str, Any]:
    """Convert a prompt and an outcome to JSON; fields that an outcome does not have are left out."""
    encoded = {
        "uid": prompt.uid,
        "prompt": prompt.text,
        "target": _plain(prompt.target, f"the target of prompt '{prompt.uid}'"),
        "columns": _plain(prompt.columns, f"the columns of prompt '{prompt.uid}'"),
        "text": outcome.text,
        "tags": dict(outcome.tags),
        "end": outcome.end,
        "recorded": dict(outcome.recorded),
        "image": None if outcome.image is None else _png(outcome.image),
        "video": None if outcome.video is None else [_png(frame) for frame in outcome.video],
        "times": None if outcome.times is None else outcome.times.tolist(),
    }
    return {name: value for name, value in encoded.items() if value is not None}


def _plain(value: Any, what: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return value.tolist()
        case Mapping():
            return {str(key): _plain(inner, what) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner, what) for inner in value]
    if dataclasses.is_dataclass(value):
        return _plain(dataclasses.asdict(value), what)
    raise TypeError(f"{what} holds a {type(value).__name__}, which does not travel as JSON")


def _png(pixels: Tensor) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, "png")  # to (height, width, 3)
    return base64.b64encode(buffer.getvalue()).decode()
