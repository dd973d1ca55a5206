"""Requests to vLLM servers and their answers, as token ids and tensors.

So the chat template and the image processor run only here, not on the server. The format is `POST
/inference/v1/generate` of vLLM 0.32 (`--enable-scale-out`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Prompt
from mmrl.kv_cache.layout import placeholders
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder

# Maps model families whose media vLLM accepts as tensors to the kinds of media. Videos of Qwen3-VL have time
# stamps as text between frames, which the format cannot express.
KINDS = {
    "qwen2_vl": {"image", "video"},
    "qwen2_5_vl": {"image", "video"},
    "qwen3_vl": {"image"},
    "llava": {"image"},
}
PATCHES = ("pixel_values", "pixel_values_videos")  # for Qwen, one patch per row, sent as bytes
FLOOR = -9999.0  # the server's value for a log-probability that is not finite
FINAL_ONLY = 2  # output kind of vLLM without streaming, which would lose all but one of n answers
RAW_VIEW = 3  # the extension type of bytes in vLLM's msgpack
NEVER = -100.0  # bias that is added to the logits of placeholders


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt: token ids (T,), log-probabilities (T,), and whether it has an end token."""

    ids: Tensor
    logp: Tensor
    stopped: bool


@dataclass(frozen=True)
class Sampling:
    """Sampling options, as in `vision.generate`."""

    max_completion_length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class WrongAnswer(ValueError):
    """Error: an answer does not belong to its request."""


class WrongWeights(WrongAnswer):
    """Error: an answer was sampled from other weights than the published weights."""


# ---- requests


def request_of(
    encoder: PromptEncoder,
    encoded: EncodedPrompt,
    sampling: Sampling,
    *,
    model: str,
    seed: int,
    n: int,
    salt: str,
) -> dict[str, Any]:
    """Make the request for `n` answers to a prompt.

    Args:
        encoder: Encoder of the policy, for end tokens, placeholders and the normalisation of images.
        encoded: The prompt.
        sampling: Sampling options.
        model: Name of the model, or of the adapter, on the server.
        seed: Seed of the first answer; the next answer has the next seed.
        n: Number of answers.
        salt: Version of the weights, so that caches of other versions are not used.
    """
    settings = {
        "n": n,
        "seed": seed,
        "max_tokens": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "logprobs": 0,
        "stop_token_ids": list(encoder.end),
        "ignore_eos": True,  # use `stop_token_ids`, not the generation_config
        "logit_bias": {str(token): NEVER for token in encoder.placeholders},
        "output_kind": FINAL_ONLY,
        "detokenize": False,
    }
    request = {
        "model": model,
        "token_ids": encoded.ids.tolist(),
        "sampling_params": settings,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    if encoded.media:
        request["features"] = features(encoder, encoded, salt)
    return request


def check_media(config: Any, prompts: Iterable[Prompt]) -> None:
    """Raise `ConfigError` for media that servers do not accept as tensors."""
    able = KINDS.get(config.model_type, set())
    for prompt in prompts:
        if other := {medium.kind for medium in prompt.media} - able:
            families = ", ".join(sorted(family for family, kinds in KINDS.items() if other <= kinds))
            kinds = " and ".join(f"{kind}s" for kind in sorted(other))
            raise ConfigError(
                f"`vision.vllm` cannot send {kinds} to a model of type '{config.model_type}', as prompt "
                f"'{prompt.uid}' has them (it can to {families}); use `vision.generate`"
            )


def features(encoder: PromptEncoder, encoded: EncodedPrompt, salt: str) -> dict[str, Any]:
    """Encode the media of a prompt as hashes, placeholder ranges and tensors, each by kind of media."""
    config = encoder.core.config
    split = family_of(config).split
    assert split is not None  # `check_media` rejects models without `split`
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[dict[str, int]]] = {}
    data: dict[str, list[str]] = {}
    for part in split(encoded.media):
        kind = next((kind for kind in MODALITIES if any(kind in name for name in part)), "image")
        item = {name: element(encoder, name, value, encoded.uid) for name, value in part.items()}
        content = packed(item)
        digest = hashlib.blake2b(content + salt.encode(), digest_size=16).hexdigest()
        hashes.setdefault(kind, []).append(digest)
        data.setdefault(kind, []).append(base64.b64encode(content).decode())
        size = sum(family_of(config).features(encoder.core, part).values())
        ranges.setdefault(kind, []).append({"length": size})
    for kind, spans in ranges.items():
        _place(spans, encoded, placeholders(config)[kind], kind)
    return {"mm_hashes": hashes, "mm_placeholders": ranges, "kwargs_data": data}


def _place(ranges: Sequence[dict[str, int]], encoded: EncodedPrompt, token: int, kind: str) -> None:
    """Set the offset of every medium's placeholders; raises ValueError if they are not contiguous."""
    at = (encoded.ids == token).nonzero()[:, 0].tolist()
    for span in ranges:
        mine, at = at[: span["length"]], at[span["length"] :]
        if len(mine) < span["length"] or mine[-1] - mine[0] + 1 != len(mine):
            raise ValueError(f"the placeholders of a {kind} of prompt '{encoded.uid}' do not stand together")
        span["offset"] = mine[0]
    if at:
        raise ValueError(f"prompt '{encoded.uid}' has {len(at)} placeholders of a {kind} too many")


def element(encoder: PromptEncoder, name: str, value: Tensor, uid: str) -> dict[str, Any]:
    """Encode a tensor of one medium, and how the server combines it with tensors of other media."""
    config: Any = encoder.core.config
    if name in PATCHES and config.model_type != "llava":
        value = as_bytes(encoder.processor.image_processor, value, uid)
        field = ["flat", {"keep_on_cpu": False, "slices": [[0, len(value), None]], "dim": 0}]
    else:
        value = value[0]  # the server stacks the media
        field = ["batched", {"keep_on_cpu": name not in PATCHES}]
    return {"data": value, "field": field}


def as_bytes(processor: Any, patches: Tensor, uid: str) -> Tensor:
    """Undo the normalisation of patches (S, 3 * pixels), which the server does again; return uint8.

    Raises ValueError if the patches are not normalised bytes of this image processor.
    """
    scale = processor.rescale_factor if processor.do_rescale else 1.0
    shape = (1, len(processor.image_mean), 1)
    mean, std = (torch.tensor(v).view(shape) for v in (processor.image_mean, processor.image_std))
    channels = patches.float().view(len(patches), shape[1], -1)
    exact = (channels * std + mean) / scale
    levels = exact.round().clamp(0, 255)
    if (worst := float((exact - levels).abs().max())) > 0.05:
        raise ValueError(
            f"the pixels of prompt '{uid}' are no bytes in the normalisation of the image processor "
            f"(they miss them by up to {worst:.2g} of a level), which the server would repeat"
        )
    return levels.to(torch.uint8).view(patches.shape)


def packed(value: Any) -> bytes:
    """Encode a value as msgpack, a tensor as vLLM does: (dtype, shape, bytes).

    All lengths take four bytes, and all integers eight bytes.
    """
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case str():
            return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        case bytes():
            return b"\xc9" + struct.pack(">IB", len(value), RAW_VIEW) + value
        case Tensor():
            raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return packed([str(value.dtype).removeprefix("torch."), list(value.shape), raw])
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
        case Mapping():
            pairs = (packed(part) for pair in value.items() for part in pair)
            return b"\xdf" + struct.pack(">I", len(value)) + b"".join(pairs)
    raise TypeError(f"cannot encode a {type(value).__name__}")


# ---- answers


def answers_of(data: bytes, request: Mapping[str, Any], uid: str, version: str) -> list[Answer]:
    """Parse the answers to a request; raise `WrongAnswer` if they do not belong to the request."""
    settings, wrong = request["sampling_params"], f"the answer of the server to prompt '{uid}'"
    try:
        reply = json.loads(data)
        echoed, choices = reply["prompt_token_ids"], reply["choices"]
        choices = sorted(choices, key=lambda choice: choice["index"])
        answers = [_answer(choice, settings) for choice in choices]
        versions = [{span["version"] for span in choice["weight_versions"] or ()} for choice in choices]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WrongAnswer(f"{wrong} is not as vLLM 0.32 writes it ({error!r}): {data[:200]!r}") from None
    if echoed != request["token_ids"]:
        raise WrongAnswer(
            f"{wrong} is about other tokens: {len(echoed or ())} instead of {len(request['token_ids'])}, or "
            "others of them; does something between rewrite prompts?"
        )
    if [choice["index"] for choice in choices] != list(range(settings["n"])):
        raise WrongAnswer(f"{wrong} holds {len(choices)} answers instead of {settings['n']}")
    if other := set().union(*versions) - {version}:
        raise WrongWeights(f"{wrong} comes from the weights {sorted(other)} instead of '{version}'")
    if not all(versions):
        raise WrongWeights(f"{wrong} does not say which weights it comes from")
    for number, answer in enumerate(answers):
        _check(answer, settings, f"answer {number} of the server to prompt '{uid}'")
    return answers


def _answer(choice: Mapping[str, Any], settings: Mapping[str, Any]) -> Answer:
    """Parse one answer (`choice`) from the server's response."""
    content = choice["logprobs"]["content"]
    ids, logp = choice["token_ids"], [float(token["logprob"]) for token in content]
    if ids != [token["token_id"] for token in content]:
        raise ValueError("its log-probabilities are of other tokens")
    stopped = bool(ids) and ids[-1] in settings["stop_token_ids"]
    return Answer(torch.tensor(ids, dtype=torch.int64), torch.tensor(logp), stopped)


def _check(answer: Answer, settings: Mapping[str, Any], name: str) -> None:
    """Raise `WrongAnswer` for a truncated answer, a media placeholder, or an invalid log-probability."""
    ids, logp = answer.ids.tolist(), answer.logp.tolist()
    if held := {str(token) for token in ids} & settings["logit_bias"].keys():
        raise WrongAnswer(f"{name} holds the placeholder of a medium, token {min(held)}")
    if bad := [value for value in logp if not math.isfinite(value) or value <= FLOOR or value > 1e-3]:
        raise WrongAnswer(f"{name} has the log-probability {bad[0]}")
    if not answer.stopped and len(ids) != settings["max_tokens"]:
        raise WrongAnswer(
            f"{name} ends after {len(ids)} tokens without an end token, and not at the limit of "
            f"{settings['max_tokens']}; is the server's --max-model-len too short?"
        )


def media_of(encoded: EncodedPrompt) -> str:
    """Name the media of a prompt, such as "text", "image", "several images" or "image and video"."""
    counts = {kind: len(encoded.media.get(f"{kind}_grid_thw", ())) for kind in MODALITIES}
    if not any(counts.values()):
        counts["image"] = len(encoded.media.get("pixel_values", ()))
    parts = [kind if number == 1 else f"several {kind}s" for kind, number in counts.items() if number]
    return " and ".join(parts) or "text"
