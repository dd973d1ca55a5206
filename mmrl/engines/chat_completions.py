"""An engine that requests chat completions from a server, such as OpenAI, vLLM or SGLang."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import engine
from mmrl.core.modalities import MODALITIES
from mmrl.core.plain_text import each_text, parted
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Message, Outcome, Part, Prompt, Rollouts, Sound, Trajectory
from mmrl.data.sound import as_wav
from mmrl.runtime.json_client import JsonClient, png


@engine(sets_tags={"finish"})
class ChatCompletions(JsonClient):
    """Request answers as chat completions from a server, such as OpenAI, vLLM or SGLang.

    Use it for judges (the reward `judge`), or with the policy `vision.recorded_answers` to evaluate a served
    model. Images are sent as PNG, videos as frames with their times, sounds as WAV. Rows are off-policy and
    have no per-step records (`notes`). Servers parse special tokens in any text, so text that looks like one
    gets a space: < |im_end|>. Redirects are not followed, and proxies are not used.

    Args:
        policy: Encodes answers as rows; a judge needs no policy.
        url: Address of the server with the API version, such as http://localhost:8000/v1.
        model: Name of the model on the server.
        api_key_env: Name of the environment variable with the API key; empty: none.
        temperature: Sampling temperature; 0 is greedy.
        max_completion_length: Largest number of tokens of an answer.
        parallel: Number of concurrent requests.
        extra: Further fields of the request, such as `{chat_template_kwargs: {enable_thinking: false}}`.
        request_timeout: Seconds until the whole answer to a request must have arrived.
        request_retries: Most retries of a request after a timeout, or if the server is busy or broken.
        wait: Seconds before the first retry; doubled before each further retry.
    """

    notes: frozenset[str] = frozenset()

    def __init__(
        self,
        policy: Policy | None,
        *,
        stream: Stream,
        url: str,
        model: str,
        api_key_env: str = "",
        temperature: NonNegativeFloat = 1.0,
        max_completion_length: PositiveInt = 1024,
        parallel: PositiveInt = 8,
        extra: Mapping[str, Any] | None = None,
        request_timeout: PositiveFloat = 120.0,
        request_retries: NonNegativeInt = 3,
        wait: NonNegativeFloat = 0.5,
    ) -> None:
        headers = {}
        if api_key_env:
            if not os.environ.get(api_key_env):
                raise ConfigError(
                    f"the engine 'chat_completions' wants the key of '{url}' in the environment variable "
                    f"{api_key_env}, which is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
        super().__init__(
            f"{url.rstrip('/')}/chat/completions",
            request_timeout=request_timeout,
            request_retries=request_retries,
            wait=wait,
            headers=headers,
        )
        self.policy, self.stream, self.model = policy, stream, model
        self.temperature, self.max_completion_length = temperature, max_completion_length
        self.parallel, self.extra = parallel, dict(extra or {})

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample one answer for every entry of `prompts`, in order."""
        counts: Counter[str] = Counter()  # number of entries of each prompt so far
        requests: list[dict[str, Any]] = []
        sent: dict[tuple[Message, ...], list[dict[str, Any]]] = {}
        for prompt in prompts:
            if prompt.messages not in sent:  # the images of a group are encoded once
                sent[prompt.messages] = [each_text(_message(turn), parted) for turn in prompt.messages]
            generator = self.stream.generator("chat_completions", prompt.uid, counts[prompt.uid])
            counts[prompt.uid] += 1
            requests.append(
                {
                    "model": self.model,
                    "messages": sent[prompt.messages],
                    "temperature": self.temperature,
                    "max_tokens": self.max_completion_length,
                    "seed": int(torch.randint(1 << 31, (1,), generator=generator)),
                    **self.extra,
                }
            )
        with ThreadPoolExecutor(self.parallel) as pool:
            outcomes = list(pool.map(self._request, requests))
        return tuple(self._row(*both) for both in zip(prompts, outcomes, strict=True))

    def _request(self, request: Mapping[str, Any]) -> Outcome:
        """Send a request and parse the chat completion; raises ValueError for any other response."""
        data = self.post(request)
        try:
            choice = json.loads(data)["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            text, finish = b"", None
        match text:
            case str() | None:  # None: the model refused, or called a tool
                tags = {"finish": "length" if finish == "length" else "stop"}
                return Outcome(text=text or "", tags=tags)
        raise ValueError(
            f"'{self.url}' must answer with a chat completion, choices[0].message.content, not {data[:120]!r}"
        )

    def _row(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Create the training row of an answer; without a policy the row has no steps."""
        if self.policy is None:
            return Trajectory(prompt, prompt.uid, (outcome,), None, 0, on_policy=False)
        return self.policy.encode(prompt, outcome)


def _message(turn: Message) -> dict[str, Any]:
    """Convert a message to OpenAI's form: a text, or a list of parts with a type such as image_url."""
    content = [item for part in turn.parts for item in _part(part)]
    if not any(part.media for part in turn.parts):
        content = "".join(part.text for part in turn.parts)
    keys = turn.keys
    for call in keys.get("tool_calls", ()):  # OpenAI expects the arguments as a JSON string
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {"role": turn.role, "content": content, **keys}


def _part(part: Part) -> list[dict[str, Any]]:
    if part.media is None:
        return [{"type": "text", "text": part.text}]
    return MODALITIES[part.media.kind].chat_parts(part.media.load())


def image_parts(frames: Frames) -> list[dict[str, Any]]:
    """Convert frames to content parts of OpenAI's form, as PNG images."""
    urls = [f"data:image/png;base64,{png(pixels)}" for pixels in frames.pixels]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def video_parts(frames: Frames) -> list[dict[str, Any]]:
    """Convert a video to content parts: the time and image of each frame, and finally the sound."""
    times = [{"type": "text", "text": f"Video at {time:.2f} s:"} for time in frames.times.tolist()]
    parts = [part for pair in zip(times, image_parts(frames), strict=True) for part in pair]
    return parts + (sound_parts(frames.sound) if frames.sound else [])


def sound_parts(sound: Sound) -> list[dict[str, Any]]:
    """Convert a sound to a content part of OpenAI's form, as 16-bit WAV."""
    data = base64.b64encode(as_wav(sound, bits=16)).decode()
    return [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
