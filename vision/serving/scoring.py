"""Log-probabilities of given tokens from vLLM servers with frozen weights: teachers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.runtime.json_client import PASSING, JsonClient, StatusError, TooLong, as_json
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving.wire import FINAL_ONLY, FLOOR, WrongAnswer, features

PAUSE = 1.0  # seconds before a request is repeated
TRIES = 3  # attempts per server after temporary refusals
PROBE = 10.0  # seconds within which a server must report its model


@dataclass(frozen=True)
class Scores:
    """Log-probabilities (T,) of tokens, and ids and log-probabilities (T, k) of the k most likely tokens."""

    logp: Tensor
    top_k_ids: Tensor
    top_k_logp: Tensor


def score_request(
    encoder: PromptEncoder, encoded: EncodedPrompt, ids: Tensor, *, model: str, top_k: int, salt: str
) -> dict[str, Any]:
    """Create the request for log-probabilities of a prompt's tokens and of the following `ids` (T,).

    Args:
        encoder: Encoder that made the prompt, for the normalisation of images.
        encoded: The prompt, with the media of the whole conversation.
        ids: The tokens after the prompt.
        model: Name of the model on the server.
        top_k: Number of most likely tokens to list at every position.
        salt: Identifier of the weights; the server shares cached keys and values only under the same salt.
    """
    request = plain_request([*encoded.ids.tolist(), *ids.tolist()], model, top_k) | {"cache_salt": salt}
    if encoded.media:
        request["features"] = features(encoder, encoded, salt)
    return request


def plain_request(ids: list[int], model: str, top_k: int) -> dict[str, Any]:
    """Create the request for log-probabilities of the tokens of a text."""
    settings = {
        "n": 1,
        "max_tokens": 1,  # minimum: requests must generate a token
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "output_kind": FINAL_ONLY,
        "detokenize": False,
    }
    return {"model": model, "token_ids": ids, "sampling_params": settings, "return_token_ids": True}


def scores_of(data: bytes, request: Mapping[str, Any], places: Tensor, uid: str) -> Scores:
    """Parse the log-probabilities of a request's tokens at the positions `places` (T,).

    Raises `WrongAnswer` if the response does not belong to the request, or lacks log-probabilities.
    """
    wrong, top_k = f"the teacher's answer to prompt '{uid}'", request["sampling_params"]["prompt_logprobs"]
    try:
        reply = json.loads(data)
        if reply["prompt_token_ids"] != request["token_ids"]:
            raise WrongAnswer(f"{wrong} is about other tokens; does something between rewrite prompts?")
        if reply["prompt_logprobs"] is None:
            raise WrongAnswer(f"{wrong} has no `prompt_logprobs`; the server must be vLLM 0.32 or later")
        given = [reply["prompt_logprobs"][place] for place in places.tolist()]
        rows = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in given]
        logp = [row[request["token_ids"][place]] for row, place in zip(rows, places.tolist(), strict=True)]
    except WrongAnswer:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise WrongAnswer(f"{wrong} is not as vLLM 0.32 writes it ({error!r}): {data[:200]!r}") from None
    values = [value for row in rows for value in row.values()]
    if bad := [value for value in values if not math.isfinite(value) or value <= FLOOR or value > 1e-3]:
        raise WrongAnswer(f"{wrong} has the log-probability {bad[0]}")
    best = []
    for row, place in zip(rows, places.tolist(), strict=True):
        likely = sorted(row.items(), key=lambda entry: -entry[1])
        if len(likely) > top_k:  # the list also has the given token
            likely.remove((request["token_ids"][place], row[request["token_ids"][place]]))
        if len(likely) != top_k:
            raise WrongAnswer(f"{wrong} has {len(likely)} likely tokens instead of {top_k}")
        best.append(likely)
    shape = (len(rows), top_k)
    ids, top = (torch.tensor([[entry[i] for entry in row] for row in best]).view(shape) for i in (0, 1))
    return Scores(torch.tensor(logp), ids.long(), top.float())


class FrozenServers:
    """vLLM servers of one model whose weights do not change; a request to a dead server goes to another.

    Args:
        urls: Addresses of the servers.
        model: Name of the model on the servers.
        top_k: Number of most likely tokens that every server must be able to list.
        checksum: Hash that the weights of all servers must have; empty: any hash that all servers share.
        parallel: Number of concurrent requests.
        request_timeout: Seconds until a request must be answered.
        timeout: Seconds for which a request is repeated while no server answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        top_k: int,
        *,
        checksum: str,
        parallel: int,
        request_timeout: float,
        timeout: float,
    ) -> None:
        self.urls, self.model, self.checksum = [url.rstrip("/") for url in urls], model, checksum
        self.probe = plain_request([0, 0], model, top_k)
        self.parallel, self.request_timeout, self.timeout = parallel, request_timeout, timeout
        self.turn, self.suspects = itertools.count(), set[str]()  # suspects: servers that may have restarted
        for url in self.urls:
            try:
                self._prove(url)
            except OSError as error:
                raise ConfigError(
                    f"the server '{url}' of the teacher does not tell what it serves: {error}"
                ) from error

    def score(self, requests: Sequence[Mapping[str, Any]], uids: Sequence[str]) -> list[bytes]:
        """Send requests to the servers in turn, and return the responses in order."""
        with ThreadPoolExecutor(self.parallel) as pool:
            pending = [pool.submit(self._ask, *pair) for pair in zip(requests, uids, strict=True)]
            try:
                return [future.result() for future in pending]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, request: Mapping[str, Any], uid: str) -> bytes:
        """Send a request to one server after another until one answers.

        Raises `WrongAnswer` if servers refuse the request, and `ConnectionError` after `timeout` seconds.
        """
        written, end, first, refused = as_json(request), time.monotonic() + self.timeout, next(self.turn), 0
        for attempt in itertools.count(1):
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                if url in self.suspects:
                    self._prove(url)
                    self.suspects.discard(url)
                return self._client(url, "inference/v1/generate", self.request_timeout).post(written)
            except TooLong as error:
                raise WrongAnswer(f"the teacher, asked about '{uid}': {error}; lower `loss_top_k`") from error
            except StatusError as error:
                refused += 1
                if error.status not in PASSING or refused == TRIES * len(self.urls):
                    raise WrongAnswer(f"the teacher refuses prompt '{uid}': {error}") from error
            except OSError as error:
                self.suspects.add(url)
                if time.monotonic() > end:
                    raise ConnectionError(f"no teacher answers prompt '{uid}': {error}") from error
            if attempt % len(self.urls) == 0:
                time.sleep(PAUSE)
        raise AssertionError("the loop returns or raises")

    def _prove(self, url: str) -> None:
        """Raise `ConfigError` if a server cannot score tokens, or if models or weights of servers differ.

        A single server without developer mode reports no checksum; `checksum` then stays empty.
        """
        try:
            names = [model["id"] for model in json.loads(self._client(url, "v1/models", PROBE).get())["data"]]
            sums = self._checksum(url)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"'{url}' is no vLLM server of version 0.32: {error!r}") from error
        if self.model not in names:
            raise ConfigError(f"the server '{url}' serves {names}, not the teacher '{self.model}'")
        self.checksum = self.checksum or sums
        if sums != self.checksum:
            raise ConfigError(
                f"the teacher on '{url}' has weights of the checksum '{sums}', not '{self.checksum}'"
            )
        self._check_scores(url)

    def _check_scores(self, url: str) -> None:
        """Raise `ConfigError` if a server returns no log-probabilities of given tokens."""
        try:
            reply = self._client(url, "inference/v1/generate", self.request_timeout).post(self.probe)
            scores_of(reply, self.probe, torch.tensor([1]), "of two tokens")
        except (StatusError, WrongAnswer) as error:
            if isinstance(error, StatusError) and error.status in PASSING:
                raise  # a temporary error: the server may answer later
            raise ConfigError(
                f"the server '{url}' tells no log-probabilities of given tokens ({error}); start it with the "
                "line that `mmrl serve-command` prints"
            ) from error

    def _checksum(self, url: str) -> str:
        """Return a hash of a server's weights; empty for a single server without developer mode."""
        try:
            reply = self._client(url, "weight_checker", self.request_timeout).post({"action": "checksum"})
        except StatusError as error:
            if error.status != 404 or self.checksum or len(self.urls) > 1:
                raise
            return ""
        return hashlib.sha256(json.dumps(json.loads(reply)["checksums"], sort_keys=True).encode()).hexdigest()

    def _client(self, url: str, path: str, timeout: float) -> JsonClient:
        return JsonClient(f"{url}/{path}", request_timeout=timeout, request_retries=0, wait=0.0)
