"""Rewards that another machine computes, over HTTP. What travels is JSON, never code."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from mmrl.registry import reward
from mmrl.types import Outcome, Prompt

LARGEST = 64 << 20  # bytes of an answer
PASSING = {408, 425, 429, 500, 502, 503, 504}  # states of a server that may be over soon


@reward
class Remote:
    """Ask a server: `batch` outcomes in a POST of JSON to `url`, `parallel` requests at once.

    Sent is `{"outcomes": [...]}`. An outcome has "uid", "prompt", "target" and "columns" of its prompt, and
    "text", "tags", "end" and "recorded" of its own; an "image" is a PNG in base64, a "video" a list of those
    with "times" in seconds. Expected is `{"rewards": [...]}`, a number or null for each. A request that gets
    no answer within `request_timeout` seconds, or finds the server busy or broken, is sent again up to
    `request_retries` times, after `wait` seconds, twice as many each time. `timeout`, `retries` and
    `on_error` hold for the round as a whole, as for any reward.
    """

    def __init__(
        self,
        *,
        url: str,
        batch: int = 64,
        parallel: int = 4,
        request_timeout: float = 60.0,
        request_retries: int = 2,
        wait: float = 0.5,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`url` must begin with http:// or https://, not '{url}'")
        if batch < 1 or parallel < 1 or request_timeout <= 0 or request_retries < 0 or wait < 0:
            raise ValueError(
                "`batch` and `parallel` must be at least 1, `request_timeout` more than 0, `request_retries` "
                f"and `wait` 0 or more, not {batch}, {parallel}, {request_timeout}, {request_retries} and "
                f"{wait}"
            )
        self.url, self.batch, self.parallel = url, batch, parallel
        self.request_timeout, self.request_retries, self.wait = request_timeout, request_retries, wait

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        told = [_told(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        parts = [told[at : at + self.batch] for at in range(0, len(told), self.batch)]
        with ThreadPoolExecutor(self.parallel) as pool:
            return [value for values in pool.map(self._ask, parts) for value in values]

    def _ask(self, part: list[dict[str, Any]]) -> list[float | None]:
        body = json.dumps({"outcomes": part}, allow_nan=False).encode()
        for left in reversed(range(1 + self.request_retries)):
            try:
                return self._read(self._send(body), len(part))
            except urllib.error.HTTPError as error:
                said = error.read(300).decode(errors="replace").strip()
                if error.code not in PASSING or not left:
                    raise ConnectionError(
                        f"'{self.url}' answered with {error.code} {error.reason}: {said}"
                    ) from None
            except (OSError, TimeoutError) as error:
                if not left:
                    reason = getattr(error, "reason", error)
                    raise ConnectionError(
                        f"'{self.url}' does not answer within {self.request_timeout:g} s, asked "
                        f"{1 + self.request_retries} times: {reason}"
                    ) from error
            time.sleep(self.wait * 2 ** (self.request_retries - left))
        raise AssertionError("the last try returns or raises")

    def _send(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=self.request_timeout) as reply:
            return reply.read(LARGEST)

    def _read(self, data: bytes, count: int) -> list[float | None]:
        """Read an answer; anything but JSON of the agreed form is a fault."""
        try:
            values = json.loads(data)["rewards"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"'{self.url}' must answer with JSON {{\"rewards\": [...]}}, not {data[:120]!r}"
            ) from None
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(f"'{self.url}' gave {str(values)[:120]} for {count} outcomes")
        for value in values:
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"'{self.url}' gave the reward {value!r}, not a number or null")
        return values


def _told(prompt: Prompt, outcome: Outcome) -> dict[str, Any]:
    """Write a prompt and an outcome as JSON has it; what an outcome does not have is left out."""
    told = {
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
    return {name: value for name, value in told.items() if value is not None}


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
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain(fields, what)
    raise TypeError(f"{what} holds a {type(value).__name__}, which does not travel as JSON")


def _png(pixels: Tensor) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()
