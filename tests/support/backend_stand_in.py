"""Stand-ins of SGLang 0.5.23, vLLM's /v1/completions and llama.cpp, for `vision.openai_server`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from mmrl.kv_cache.layout import placeholders
from mmrl.vision.serving.backend import one_each
from tests.support.vllm_stand_in import Handler, StandIn


class BackendStandIn(StandIn):
    """Draws tokens from the seeds as `StandIn` does; `kind` names what it is.

    `adapters` are the adapters that it was told to load, and `path` the weights.
    """

    def __init__(self, policy: Any, prompts: Any, kind: str, *, name: str = "") -> None:
        self.kind, self.path = kind, ""
        super().__init__(policy, prompts, name=name)
        token = placeholders(policy.prompt_encoder.core.config).get("image", -1)
        self.known |= {tuple(one_each(ids, token)): prompt for ids, prompt in self.known.items()}

    def start(self) -> None:
        """Start, or start again without adapters."""
        self.adapters: dict[str, str] = {}
        super().start()

    def handler_class(self) -> type[Handler]:
        """Return the handler of requests."""
        return BackendHandler

    def paths(self) -> list[str]:
        """List what it was told, without requests for answers."""
        return [path for path, _ in self.told if path not in ROUTES.values()]

    def drawn(self, ids: Sequence[int], seeds: Sequence[int], most: int) -> list[dict[str, Any]]:
        """Draw an answer for every seed, with its log-probabilities."""
        prompt = self.known[tuple(ids)]
        request = {"token_ids": self.policy.prompt_encoder.encode(prompt).ids.tolist()}
        ends = list(self.policy.prompt_encoder.end)
        return [
            self.answer(
                {
                    **request,
                    "sampling_params": {"n": 1, "seed": seed, "max_tokens": most, "stop_token_ids": ends},
                }
            )
            for seed in seeds
        ]


ROUTES = {"sglang": "generate", "vllm": "v1/completions", "llama.cpp": "completion"}


def as_sglang(me: BackendStandIn, asked: dict[str, Any]) -> Any:
    """Answer `POST /generate`."""
    settings = asked["sampling_params"]
    seeds = [one["sampling_seed"] for one in settings]
    assert not settings[0]["ignore_eos"] and all(name in me.adapters for name in asked.get("lora_path", ()))
    items = []
    for reply in me.drawn(asked["input_ids"][0], seeds, settings[0]["max_new_tokens"]):
        (choice,) = reply["choices"]
        content = choice["logprobs"]["content"]
        told: dict[str, Any] = {
            "weight_version": me.version,
            "finish_reason": {"type": choice["finish_reason"]},
        }
        if asked["return_logprob"]:
            told["output_token_logprobs"] = [[one["logprob"], one["token_id"], None] for one in content]
        items.append(
            {
                "text": "",
                "output_ids": choice["token_ids"],
                "prompt_token_ids": reply["prompt_token_ids"],
                "meta_info": told,
            }
        )
    return items


def as_completions(me: BackendStandIn, asked: dict[str, Any]) -> Any:
    """Answer `POST /v1/completions`."""
    assert asked["model"] == "policy" or asked["model"] in me.adapters
    choices = []
    for index, seed in enumerate(range(asked["seed"], asked["seed"] + asked["n"])):
        (reply,) = me.drawn(asked["prompt"], [seed], asked["max_tokens"])
        (choice,) = reply["choices"]
        logp = [one["logprob"] for one in choice["logprobs"]["content"]]
        choices.append(
            {
                "index": index,
                "finish_reason": choice["finish_reason"],
                "text": "",
                "token_ids": choice["token_ids"],
                "prompt_token_ids": reply["prompt_token_ids"],
                "logprobs": {"token_logprobs": logp} if "logprobs" in asked else None,
            }
        )
    return {"model": asked["model"], "choices": choices}


def as_llama_cpp(me: BackendStandIn, asked: dict[str, Any]) -> Any:
    """Answer `POST /completion`."""
    (reply,) = me.drawn(asked["prompt"], [asked["seed"]], asked["n_predict"])
    (choice,) = reply["choices"]
    logp = torch.tensor([one["logprob"] for one in choice["logprobs"]["content"]], dtype=torch.float64)
    name, values = ("prob", logp.exp()) if asked["post_sampling_probs"] else ("logprob", logp)
    item = {
        "tokens": choice["token_ids"],
        "tokens_evaluated": len(reply["prompt_token_ids"]),
        "truncated": False,
        "content": "x",
        "stop_type": {"stop": "eos"}.get(choice["finish_reason"], "limit"),
    }
    if asked["n_probs"]:
        item["completion_probabilities"] = [
            {"id": token, name: value}
            for token, value in zip(choice["token_ids"], values.tolist(), strict=True)
        ]
    return item


ANSWERS = {"sglang": as_sglang, "vllm": as_completions, "llama.cpp": as_llama_cpp}


class BackendHandler(Handler):
    """Reads a request and writes what the stand-in answers."""

    stand_in: BackendStandIn

    def do_GET(self) -> None:
        """Tell the version of the weights, the models, or that it lives."""
        me = self.stand_in
        match urlsplit(self.path).path.strip("/"), me.kind:
            case "model_info", "sglang":
                self._write({"weight_version": me.version, "model_path": me.path})
            case "v1/models", "sglang" | "vllm":
                self._write({"data": [{"id": name} for name in ("policy", *me.adapters)]})
            case "health", "llama.cpp":
                self._write({"status": "ok"})
            case other, _:
                self._write({"error": f"no {other}"}, 404)

    def do_POST(self) -> None:
        """Answer, or do as told."""
        me, path = self.stand_in, urlsplit(self.path).path.strip("/")
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        me.told.append((path, content))
        match path.removeprefix("v1/") if me.kind == "vllm" else path:
            case _ if path == ROUTES[me.kind]:
                reply = me.fault(ANSWERS[me.kind](me, content))
                with me.lock:
                    me.left = None if me.left is None else me.left - 1
                if me.left is not None and me.left < 0:
                    me.kill()
                    return
                self._write(reply, reply.get("status", 200) if isinstance(reply, dict) else 200)
            case "load_lora_adapter" if me.kind != "llama.cpp":
                assert (Path(content["lora_path"]) / "adapter_config.json").exists()
                assert content["lora_name"] not in me.adapters
                me.adapters[content["lora_name"]] = content["lora_path"]
                self._write({"success": True})
            case "unload_lora_adapter" if me.kind != "llama.cpp":
                del me.adapters[content["lora_name"]]
                self._write({"success": True})
            case "update_weights_from_disk" if me.kind == "sglang":
                assert list(Path(content["model_path"]).glob("*.safetensors")) and content["flush_cache"]
                me.path, me.version = content["model_path"], content["weight_version"]
                self._write({"success": True})
            case "update_weight_version" if me.kind == "sglang":
                assert not content["abort_all_requests"]
                me.version = content["new_version"]
                self._write({"success": True})
            case "weights_checker" if me.kind == "sglang":
                self._write({"success": True, "per_engine_checksum": me.name})
            case _:
                self._write({"error": f"no {path}"}, 404)
