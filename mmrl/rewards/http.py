"""Rewards computed by a server, over HTTP with JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.json_client import JsonClient, png


@reward
class Http(JsonClient):
    """Get rewards from a server, by POST requests of JSON.

    A request is `{"outcomes": [...]}`. An outcome has "uid", "prompt", "target" and "columns" of its prompt,
    and the fields "text", "tags", "end" and "recorded"; an "image" is a PNG in base64, a "video" is a list of
    PNGs with "times" in seconds. The response is `{"rewards": [...]}`, a finite number or null for each
    outcome, in at most 64 MiB. Redirects and proxies are not used. The settings `timeout`, `retries` and
    `on_error`, which every reward has, apply to the whole call, that is to all its requests together.

    Args:
        url: Address of the server, http:// or https://.
        batch: Outcomes per request.
        parallel: Concurrent requests.
        request_timeout: Seconds within which the whole response must arrive.
        request_retries: Times a request is repeated after a timeout or an error of the server.
        wait: Seconds before the first retry; doubled before each further retry.
    """

    takes_columns = True  # requests contain all columns of the data

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
        super().__init__(url, request_timeout=request_timeout, request_retries=request_retries, wait=wait)
        self.batch, self.parallel = batch, parallel

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        encoded = [outcome_json(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        values = self.ask(encoded, "outcomes", "rewards")
        for value in values:
            # Reject NaN, infinity and integers too large for a float.
            if value is not None and not (type(value) in (int, float) and abs(value) <= sys.float_info.max):
                shown = repr(value)[:120]
                raise ValueError(f"'{self.url}' gave the reward {shown}, not a finite number or null")
        return [None if value is None else float(value) for value in values]

    def ask(self, items: Sequence[Any], sent: str, wanted: str) -> list[Any]:
        """Send items in batches as `{sent: [...]}`; return the values from the responses `{wanted: [...]}`.

        There is one value per item. Raises `ValueError` if a response has another form.
        """

        def ask(part: Sequence[Any]) -> list[Any]:
            data = self.post({sent: part})
            try:
                values = json.loads(data)[wanted]
            except (ValueError, KeyError, TypeError, RecursionError):
                form = f'{{"{wanted}": [...]}}'
                raise ValueError(f"'{self.url}' must answer with JSON {form}, not {data[:120]!r}") from None
            if type(values) is not list or len(values) != len(part):
                raise ValueError(f"'{self.url}' gave {str(values)[:120]} for {len(part)} {sent}")
            return values

        parts = [items[at : at + self.batch] for at in range(0, len(items), self.batch)]
        with ThreadPoolExecutor(self.parallel) as pool:
            return [value for values in pool.map(ask, parts) for value in values]


def outcome_json(prompt: Prompt, outcome: Outcome) -> dict[str, Any]:
    """Convert a prompt and an outcome to JSON, without the fields that are None."""
    encoded = {
        "uid": prompt.uid,
        "prompt": prompt.text,
        "target": as_json(prompt.target, f"the target of prompt '{prompt.uid}'"),
        "columns": as_json(prompt.columns, f"the columns of prompt '{prompt.uid}'"),
        "text": outcome.text,
        "tags": dict(outcome.tags),
        "end": outcome.end,
        "recorded": dict(outcome.recorded),
        "image": None if outcome.image is None else png(outcome.image),
        "video": None if outcome.video is None else [png(frame) for frame in outcome.video],
        "times": None if outcome.times is None else outcome.times.tolist(),
    }
    return {name: value for name, value in encoded.items() if value is not None}


def as_json(value: Any, what: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return value.tolist()
        case Mapping():
            return {str(key): as_json(inner, what) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [as_json(inner, what) for inner in value]
    if dataclasses.is_dataclass(value):
        return as_json(dataclasses.asdict(value), what)
    raise TypeError(f"{what} holds a {type(value).__name__}, which does not travel as JSON")
