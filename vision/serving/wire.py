"""Requests to vLLM servers, and parsers of their responses, with token ids and tensors instead of text.

So the chat template and the image processor run only here, not on the server. The format is `POST
/inference/v1/generate` of vLLM 0.32 and 0.33 (`--enable-scale-out`); `vision/serving/families/` has
the tensors of families.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.core.types import Prompt
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.serving import families
from mmrl.vision.serving.served_family import Item, ServedFamily, kind_of

SERVED: dict[str, ServedFamily] = {
    model_type: family
    for module in iter_modules(families.__path__, f"{families.__name__}.")
    for model_type, family in import_module(module.name).FAMILIES.items()
}
FLOOR = -9999.0  # the server's value for a log-probability that is not finite
FINAL_ONLY = 2  # vLLM's output kind without streaming (streaming loses all but one of n answers)
RAW_VIEW = 3  # the extension type of bytes in vLLM's msgpack
ECHO = "echo"  # local key: token ids that the reply must repeat, if they differ from the sent ones
NEVER = -100.0  # bias that is added to the logits of placeholders


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt: token ids (T,), log-probabilities (T,), and whether it has an end token.

    `listed` maps the tokens of the setting `logprob_token_ids` to log-probabilities at the first position.
    """

    ids: Tensor
    logp: Tensor
    stopped: bool
    listed: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """Sampling options, as in `vision.generate`."""

    max_completion_length: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class WrongAnswer(ValueError):
    """Raised if an answer does not belong to its request."""


class WrongWeights(WrongAnswer):
    """Raised if an answer was sampled from other weights than the published ones."""


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
    """Create the request for `n` answers to a prompt.

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
    files = served_family(encoder.core.config).files
    if encoded.media and files is None:
        request["features"] = features(encoder, encoded, salt)
    elif encoded.media and files is not None:
        ids, images = files(encoder, encoded)
        request |= {"token_ids": ids.tolist(), ECHO: encoded.ids.tolist()}
        request["content_parts"] = [_file(image, salt) for image in images]
    return request


def _file(image: bytes, salt: str) -> dict[str, str]:
    """Encode an image file, with a hash under which the server caches it."""
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "url": url, "uuid": digest_of(image, salt)}


def digest_of(content: bytes, salt: str) -> str:
    """Hash the content of an item and the version of the weights."""
    return hashlib.blake2b(content + salt.encode(), digest_size=16).hexdigest()


def check_media(config: Any, prompts: Iterable[Prompt]) -> None:
    """Raise `ConfigError` for media that servers do not accept as tensors."""
    for prompt in prompts:
        check_kinds(config, prompt.uid, {medium.kind for medium in prompt.media})


def served_family(config: Any) -> ServedFamily:
    """Return the `ServedFamily` of a `model_type`; an unknown type gets one without media."""
    return SERVED.get(config.model_type, ServedFamily())


def check_kinds(config: Any, uid: str, kinds: Set[str]) -> None:
    """Raise `ConfigError` for kinds of media in a prompt that servers do not accept as tensors."""
    family = served_family(config)
    if other := kinds - family.kinds.keys():
        able = sorted(name for name, one in SERVED.items() if other <= one.kinds.keys())
        named = " and ".join(f"{kind}s" for kind in sorted(other))
        reasons = [family.refused[kind] for kind in sorted(other & family.refused.keys())]
        why = f": {'; '.join(reasons)}" if reasons else f" (it can to {', '.join(able)})"
        raise ConfigError(
            f"`vision.vllm` cannot send {named} to a model of type '{config.model_type}', as prompt '{uid}' "
            f"has them{why}; use `vision.generate`"
        )


def modalities(config: Any, kinds: Iterable[str]) -> set[str]:
    """Return the server's types of input (`image`, `video`) for kinds of media."""
    sent = served_family(config).kinds
    return {sent[kind] for kind in kinds}


def check_tensors(config: Any, uid: str) -> None:
    """Raise `ConfigError` if servers accept images only as files, which only rollouts can send."""
    if served_family(config).files is not None:
        raise ConfigError(
            f"the images of prompt '{uid}' cannot be sent as tensors to a model of type "
            f"'{config.model_type}', but as files, which is possible for rollouts only"
        )


def features(encoder: PromptEncoder, encoded: EncodedPrompt, salt: str) -> dict[str, Any]:
    """Encode the media of a prompt as hashes, placeholder ranges and tensors, each keyed by modality."""
    config: Any = encoder.core.config
    check_tensors(config, encoded.uid)
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[dict[str, int]]] = {}
    data: dict[str, list[str]] = {}
    items = served_family(config).items(encoder, encoded)
    for offset, item in sorted(zip(offsets(items, encoded), items, strict=True), key=lambda pair: pair[0]):
        content = packed({name: field.form for name, field in item.fields.items()})
        hashes.setdefault(item.modality, []).append(digest_of(content, salt))
        data.setdefault(item.modality, []).append(base64.b64encode(content).decode())
        ranges.setdefault(item.modality, []).append({"length": item.length, "offset": offset})
    return {"mm_hashes": hashes, "mm_placeholders": ranges, "kwargs_data": data}


def offsets(items: Sequence[Item], encoded: EncodedPrompt) -> list[int]:
    """Find the first placeholder of every item; raises ValueError if they are not contiguous."""
    at = {item.token: (encoded.ids == item.token).nonzero()[:, 0].tolist() for item in items}
    firsts = []
    for item in items:
        mine, at[item.token] = at[item.token][: item.length], at[item.token][item.length :]
        if len(mine) < item.length or mine[-1] - mine[0] + 1 != len(mine):
            raise ValueError(
                f"the placeholders of one {item.modality} of prompt '{encoded.uid}' do not stand together"
            )
        firsts.append(mine[0])
    if left := sum(map(len, at.values())):
        raise ValueError(f"prompt '{encoded.uid}' has {left} placeholders of media too many")
    return firsts


def packed(value: Any) -> bytes:
    """Encode a value as msgpack, with tensors in vLLM's form: (dtype, shape, bytes).

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
        raise WrongAnswer(f"{wrong} is not as vLLM writes it ({error!r}): {data[:200]!r}") from None
    wanted = request.get(ECHO, request["token_ids"])
    if echoed != wanted:
        raise WrongAnswer(
            f"{wrong} is about other tokens: {len(echoed or ())} instead of {len(wanted)}, or "
            "others of them; does something between rewrite prompts?"
        )
    if [choice["index"] for choice in choices] != list(range(settings["n"])):
        raise WrongAnswer(f"{wrong} holds {len(choices)} answers instead of {settings['n']}")
    if other := set().union(*versions) - {version}:
        raise WrongWeights(f"{wrong} comes from the weights {sorted(other)} instead of '{version}'")
    if not all(versions):
        raise WrongWeights(f"{wrong} does not say which weights it comes from")
    for number, answer in enumerate(answers):
        check_answer(answer, settings, f"answer {number} of the server to prompt '{uid}'")
    return answers


def _answer(choice: Mapping[str, Any], settings: Mapping[str, Any]) -> Answer:
    """Parse one answer (`choice`) from the server's response."""
    content = choice["logprobs"]["content"]
    ids, logp = choice["token_ids"], [float(token["logprob"]) for token in content]
    if ids != [token["token_id"] for token in content]:
        raise ValueError("its log-probabilities are of other tokens")
    stopped = bool(ids) and ids[-1] in settings["stop_token_ids"]
    asked = settings.get("logprob_token_ids", ())
    shown = content[0]["top_logprobs"] if asked and content else ()
    top = {token["token_id"]: float(token["logprob"]) for token in shown}
    listed = {token: top[token] for token in asked}
    return Answer(torch.tensor(ids, dtype=torch.int64), torch.tensor(logp), stopped, listed)


def check_answer(answer: Answer, settings: Mapping[str, Any], name: str) -> None:
    """Raise `WrongAnswer` for an early end, a media placeholder, or an invalid log-probability."""
    ids, logp = answer.ids.tolist(), answer.logp.tolist()
    if held := {str(token) for token in ids} & settings["logit_bias"].keys():
        raise WrongAnswer(f"{name} holds the placeholder of a medium, token {min(held)}")
    logp += answer.listed.values()
    if bad := [value for value in logp if not math.isfinite(value) or value <= FLOOR or value > 1e-3]:
        raise WrongAnswer(f"{name} has the log-probability {bad[0]}")
    if not answer.stopped and len(ids) != settings["max_tokens"]:
        raise WrongAnswer(
            f"{name} ends after {len(ids)} tokens without an end token, and not at the limit of "
            f"{settings['max_tokens']}; is the server's --max-model-len too short?"
        )


def media_of(encoded: EncodedPrompt) -> str:
    """Name the media of a prompt, such as "text", "image", "several images" or "image and video"."""
    numbers = numbers_of(encoded).items()
    parts = [kind if number == 1 else f"several {kind}s" for kind, number in numbers if number]
    return " and ".join(parts) or "text"


def numbers_of(encoded: EncodedPrompt) -> dict[str, int]:
    """Count the media of a prompt by kind; without a grid tensor, every tile or frame counts as one."""
    counts = dict.fromkeys(MODALITIES, 0)
    for name, value in encoded.media.items():
        if name.startswith(("pixel_values", "input_features")) and not name.endswith("mask"):
            kind = "audio" if name.startswith("input_features") else kind_of(name)
            counts[kind] = len(encoded.media.get(f"{kind}_grid_thw", value))
    return counts
