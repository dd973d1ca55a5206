"""Kinds of servers with an OpenAI-style API: their requests, replies, weight updates and commands.

Every kind is a class with an entry in `BACKENDS`. Written for SGLang 0.5.23, vLLM 0.32 and llama.cpp b11549.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mmrl.config.schema import Piece
from mmrl.runtime.json_client import as_json
from mmrl.vision.serving.agreement import CAUSES
from mmrl.vision.serving.backend import MODEL, Backend, Choice, Question, one_each
from mmrl.vision.serving.command import lora_flags, lora_rank, port_of
from mmrl.vision.serving.server import ADAPTER, Weights
from mmrl.vision.serving.wire import NEVER


class Sglang(Backend):
    """SGLang: `POST /generate` with token ids, and images as files, which the server preprocesses."""

    title = "SGLang server of version 0.5"
    info, route = "model_info", "generate"
    takes = frozenset({"adapter", "model"})
    families = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
    token_ids, logprobs = "return_prompt_token_ids", "return_logprob"
    causes: ClassVar[Mapping[str, str]] = {
        "text": "do `policy.model` and `policy.dtype` agree with what it serves, and is "
        "SGLANG_RETURN_ORIGINAL_LOGPROB unset in its environment?",
        "image": "does its image processor have the policy's `min_pixels` and `max_pixels`?",
        "video": "",  # videos are not sent
    }

    @classmethod
    def write(cls, question: Question) -> dict[str, Any]:
        chosen, n = question.sampling, question.n
        settings = {
            "max_new_tokens": chosen.max_completion_length,
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k or -1,
            "min_p": chosen.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": question.end,
            "ignore_eos": False,  # true would ignore `stop_token_ids` as well
            "logit_bias": question.bias,
            "skip_special_tokens": False,
        }
        # One entry per answer, because `n` answers of one entry would share a seed and be equal.
        request = {
            "input_ids": [one_each(question.ids, question.image_token)] * n,
            "sampling_params": [{**settings, "sampling_seed": question.seed + i} for i in range(n)],
            "return_logprob": question.logprobs,
            "return_prompt_token_ids": True,
        }
        if question.images:
            request["image_data"] = [list(question.images)] * n
        if question.adapter:
            request["lora_path"] = [question.model] * n
        return request

    @classmethod
    def read(cls, reply: Any, question: Question) -> list[Choice]:
        choices = []
        for item in reply if isinstance(reply, list) else [reply]:
            meta, ids = item["meta_info"], item.get("output_ids")
            spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
            drawn = meta.get("output_token_logprobs")
            if drawn is not None and ids is not None and [token for _, token, *_ in drawn] != ids:
                raise ValueError("its log-probabilities are of other tokens")
            choices.append(
                Choice(
                    ids,
                    None if drawn is None else [float(logp) for logp, *_ in drawn],
                    item.get("prompt_token_ids"),
                    meta["finish_reason"]["type"] == "stop",
                    {span["version"] for span in spans},
                )
            )
        return choices

    @classmethod
    def command(cls, policy: Piece, *, cpu: bool) -> list[str]:
        words = ["python", "-m", "sglang.launch_server", "--model-path", str(policy.options["model"])]
        words += ["--served-model-name", MODEL, "--dtype", str(policy.options.get("dtype", "bfloat16"))]
        words += ["--enable-deterministic-inference"]  # otherwise the server ignores seeds
        if rank := lora_rank(policy):
            words += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all"]
        return [*words, *(["--device", "cpu"] if cpu else [])]

    def parse_version(self, info: Any) -> str:
        return info["weight_version"]

    def load(self, weights: Weights) -> None:
        """Load weights when all requests are answered; this also clears the server's caches."""
        if weights.adapter:
            self.swap_adapter(weights, "")
            version = {"new_version": weights.version, "abort_all_requests": False}
            self.post("update_weight_version", version)
        else:
            load = {"model_path": str(weights.folder), "weight_version": weights.version}
            self.post("update_weights_from_disk", {**load, "flush_cache": True})

    def checksum(self) -> str:
        return json.loads(self.post("weights_checker", {"action": "checksum"}))["per_engine_checksum"]


class Completions(Backend):
    """vLLM without `--enable-scale-out`: `POST /v1/completions` with token ids, text only."""

    title = "vLLM server with /v1/completions"
    info, route = "v1/models", "v1/completions"
    takes = frozenset({"adapter"})
    token_ids, logprobs = "return_token_ids", "logprobs"

    @classmethod
    def write(cls, question: Question) -> dict[str, Any]:
        chosen = question.sampling
        return {
            "model": question.model,
            "prompt": question.ids,
            "n": question.n,
            "seed": question.seed,
            "max_tokens": chosen.max_completion_length,
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k,
            "min_p": chosen.min_p,
            "repetition_penalty": 1.0,
            "stop_token_ids": question.end,
            "ignore_eos": True,  # use `stop_token_ids`, not the generation_config
            "logit_bias": question.bias,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "cache_salt": question.version,
            **({"logprobs": 0} if question.logprobs else {}),
        }

    @classmethod
    def read(cls, reply: Any, question: Question) -> list[Choice]:
        # An adapter's version is in the model name of the reply; a full model has no version in its name.
        version = reply["model"].removeprefix(f"{ADAPTER}-") if question.adapter else ""
        choices = []
        for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
            drawn = choice.get("logprobs") and [float(logp) for logp in choice["logprobs"]["token_logprobs"]]
            choices.append(
                Choice(
                    choice.get("token_ids"),
                    drawn,
                    choice.get("prompt_token_ids"),
                    choice["finish_reason"] == "stop",
                    {version} - {""},
                )
            )
        return choices

    @classmethod
    def command(cls, policy: Piece, *, cpu: bool) -> list[str]:
        words = ["vllm", "serve", str(policy.options["model"]), "--served-model-name", MODEL]
        words += ["--dtype", str(policy.options.get("dtype", "bfloat16"))]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if rank := lora_rank(policy):
            words = ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", *words]
            words += [word for pair in lora_flags(rank).items() for word in pair if word]
        # A seeded request whose prompt is prefilled in two steps crashes a server on a CPU.
        return [*words, *(["--max-num-batched-tokens", "32768", "--block-size", "32"] if cpu else [])]

    def parse_version(self, info: Any) -> str:
        names = [model["id"] for model in info["data"]]
        adapters = [name.removeprefix(f"{ADAPTER}-") for name in names if name.startswith(ADAPTER)]
        return self.held or (adapters[0] if len(adapters) == 1 else "unknown")

    def load(self, weights: Weights) -> None:
        if weights.adapter:
            self.swap_adapter(weights, "v1/")
        else:
            super().load(weights)


class LlamaCpp(Backend):
    """llama.cpp's `llama-server`: `POST /completion` with token ids, text only, weights of its GGUF file."""

    title = "llama.cpp server"
    info, route, echoes = "health", "completion", False
    token_ids, logprobs = "return_tokens", "n_probs"
    causes: ClassVar[Mapping[str, str]] = {
        **CAUSES,
        "text": "is its GGUF file made of the policy's weights, and in their precision? A quantised one is "
        "another policy (`logprobs: false` compares nothing)",
    }

    @classmethod
    def write(cls, question: Question) -> dict[str, Any]:
        chosen = question.sampling
        return {
            "prompt": question.ids,
            "n_cmpl": question.n,  # `generate` sends one request per answer
            "seed": question.seed,
            "n_predict": chosen.max_completion_length,
            # Apply the temperature first, as other servers do; omit llama.cpp's other default samplers.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "temperature": chosen.temperature,
            "top_k": chosen.top_k,
            "top_p": chosen.top_p,
            "min_p": chosen.min_p,
            "logit_bias": [[token, NEVER] for token in question.forbidden],
            "return_tokens": True,
            "n_probs": int(question.logprobs),
            # Return log-probabilities after temperature and truncation; for greedy answers, at temperature 1.
            "post_sampling_probs": chosen.temperature > 0,
            "cache_prompt": False,
        }

    def generate(self, request: bytes) -> bytes:
        """Request answers one by one, because `n_cmpl` must not exceed the server's number of slots."""
        asked = json.loads(request)
        each = [{**asked, "n_cmpl": 1, "seed": asked["seed"] + i} for i in range(asked["n_cmpl"])]
        return b"[" + b",".join(super(LlamaCpp, self).generate(as_json(one)) for one in each) + b"]"

    @classmethod
    def read(cls, reply: Any, question: Question) -> list[Choice]:
        choices = []
        for item in reply:
            if item["tokens_evaluated"] != len(question.ids) or item["truncated"]:
                raise ValueError(f"it read {item['tokens_evaluated']} tokens of {len(question.ids)}")
            ids, drawn = item.get("tokens") or None, item.get("completion_probabilities")
            if drawn is None and not item["content"].strip("\ufffd"):  # no character yet
                drawn = []
            choices.append(
                Choice(
                    ids,
                    placed(ids, drawn) if ids and drawn is not None else None,
                    None,
                    item["stop_type"] == "eos",
                )
            )
        return choices

    @classmethod
    def command(cls, policy: Piece, *, cpu: bool) -> list[str]:
        words = ["llama-server", "--model", f"{Path(str(policy.options['model'])).name}.gguf"]
        exact = ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
        return words + (exact if policy.options.get("dtype", "bfloat16") == "float32" else [])


BACKENDS: dict[str, type[Backend]] = {"sglang": Sglang, "vllm": Completions, "llama.cpp": LlamaCpp}


def placed(ids: Sequence[int], drawn: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Align the log-probabilities of llama.cpp with the tokens of the answer; None if unknown.

    The server leaves out tokens after which the text ends inside a multi-byte character. Its entries are a
    subsequence of the tokens; an entry is used only if its leftmost and rightmost match are the same token.
    With `post_sampling_probs` an entry has `prob`, else `logprob`. Raises ValueError without a match.
    """
    tokens = [entry["id"] for entry in drawn]
    first, last = _leftmost(ids, tokens), _leftmost(ids[::-1], tokens[::-1])[::-1]
    logp: list[float | None] = [None] * len(ids)
    for entry, place, back in zip(drawn, first, last, strict=True):
        if place == len(ids) - 1 - back:
            logp[place] = math.log(entry["prob"]) if "prob" in entry else float(entry["logprob"])
    return logp


def _leftmost(ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Find the leftmost positions in `ids` of the subsequence `tokens`; ValueError if it does not occur."""
    rest = iter(enumerate(ids))
    places = [next((place for place, held in rest if held == token), None) for token in tokens]
    if None in places:
        raise ValueError("its log-probabilities are of other tokens")
    return [place for place in places if place is not None]


def command_lines(policy: Piece, options: Mapping[str, Any], *, cpu: bool = False) -> list[str]:
    """Return the command lines that start the servers, one per address in `servers`."""
    lines = []
    for url in options["servers"]:
        at = urlsplit(url)
        where = ["--host", at.hostname or "localhost", "--port", str(port_of(url))]
        lines.append(shlex.join([*BACKENDS[options["backend"]].command(policy, cpu=cpu), *where]))
    return lines
