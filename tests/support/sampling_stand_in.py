"""A stand-in for a server that samples from a policy, for any request of the engines of a test."""

from __future__ import annotations

import json
from typing import Any

import torch

from mmrl.core.rng import Stream
from mmrl.core.types import Prompt
from mmrl.vision.decoding.decoding import GenerationRequest
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.vllm import Vllm
from tests.support.vllm_stand_in import FORWARD, StandIn, one_at_a_time

INFO = {
    "model_config": {
        "multimodal_config": {"mm_processor_cache_gb": 4.0, "mm_processor_cache_type": "lru"},
    },
    "parallel_config": {"_api_process_count": 1, "data_parallel_size": 1},
}


def watch(monkeypatch: Any) -> dict:
    """Note the prompts of all requests that engines make, by their tokens and the hashes of their media."""
    seen, request = {}, Vllm.request

    def noting(self: Vllm, encoded: Any, *rest: Any, **options: Any) -> dict[str, Any]:
        made = request(self, encoded, *rest, **options)
        seen[key_of(made)] = encoded
        return made

    monkeypatch.setattr(Vllm, "request", noting)
    return seen


def key_of(request: Any) -> tuple:
    """Name what a request shows."""
    return tuple(request["token_ids"]), json.dumps(request.get("features", {}).get("mm_hashes"))


class Sampling(StandIn):
    """Answers with tokens that follow from its policy, the prompt and the seed.

    `media` are the hashes that it keeps; None: it says nothing about a cache, so that it gets all media.
    """

    def __init__(self, policy: Any, seen: dict, **options: Any) -> None:
        super().__init__(policy, (), **options)
        self.seen = seen
        self.media: set[str] | None = None
        self.answered: list[tuple[dict, list[dict]]] = []  # requests with the choices that answer them

    def follow(self, policy: Any) -> None:
        """Sample from another policy, such as that of a run."""
        self.policy = policy
        one_at_a_time(policy.module)

    def info(self) -> dict[str, Any]:
        """Describe its configuration, as `/server_info?config_format=json` does."""
        return {"vllm_config": INFO} if self.media is not None else {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request; refuse one with the hash of a medium that it does not keep."""
        if self.media is not None and (features := request.get("features")):
            for kind, hashes in features["mm_hashes"].items():
                items = list(zip(hashes, features["kwargs_data"][kind], strict=True))
                if any(item is None and digest not in self.media for digest, item in items):
                    return {"error": "Internal server error", "status": 500}
                self.media |= {digest for digest, item in items if item is not None}
        settings, encoded = request["sampling_params"], self.seen[key_of(request)]
        assert settings["stop_token_ids"] == list(self.policy.prompt_encoder.end)
        options = {"temperature": settings["temperature"], "max_completion_length": settings["max_tokens"]}
        engine, prompt = Generate(self.policy, stream=Stream(0), **options), Prompt(encoded.uid, ())
        choices = []
        with FORWARD, torch.no_grad():
            for index in range(settings["n"]):
                generator = torch.Generator().manual_seed(settings["seed"] + index)
                uniform = torch.rand(settings["max_tokens"], generator=generator)
                (row,) = engine.answer([GenerationRequest(prompt, index, encoded, uniform)])
                stopped = row.outcomes[0].tags["finish"] == "stop"
                choices.append(
                    {"index": index, **self._written(row.steps.ids.tolist(), row.notes["logp"], stopped)}
                )
            if wanted := settings.get("logprob_token_ids"):
                with engine.running():
                    logits = engine.reader([encoded]).read(None)[0]
                logp = (logits / (settings["temperature"] or 1.0)).log_softmax(-1).tolist()
                (drawn,) = choices[0]["token_ids"]
                # One entry for the drawn token and one for each listed token, cut at `logprobs` entries.
                top = dict.fromkeys([drawn, *wanted])
                shown = [{"token_id": token, "logprob": logp[token]} for token in top]
                choices[0]["logprobs"]["content"][0]["top_logprobs"] = shown[: settings["logprobs"]]
        self.answered.append((request, choices))
        return {"prompt_token_ids": request["token_ids"], "choices": choices}

    def _written(self, ids: list[int], logp: torch.Tensor, stopped: bool) -> dict[str, Any]:
        content = [{"token_id": i, "logprob": p} for i, p in zip(ids, logp.tolist(), strict=True)]
        return {
            "token_ids": ids,
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
