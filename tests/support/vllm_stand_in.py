"""A server that answers as vLLM 0.32 does, with tokens drawn from the seed, and with faults on request."""

from __future__ import annotations

import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from mmrl.core.types import Outcome, Trajectory
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.serving.worker import mmrl_group

PASSES = {"pause", "resume", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"}
PASSES |= {"sleep", "wake_up", "start_weight_update", "finish_weight_update"}


TOP_K = ("top_k_ids", "top_k_logp")
FORWARD = threading.RLock()  # a model is read by one thread at a time


def one_at_a_time(module: torch.nn.Module) -> None:
    """Let the threads of stand-ins and the test take turns with a model."""
    module.register_forward_pre_hook(lambda *_: FORWARD.acquire() and None)
    module.register_forward_hook(lambda *_: FORWARD.release(), always_call=True)


class StandIn:
    """Holds the name of its weights, what it was told, and a fault: a function that changes an answer.

    Log-probabilities are those of `policy`, plus `off`, for tokens that follow from seed and number alone.
    """

    def __init__(self, policy: Any, prompts: Any, *, name: str = "") -> None:
        encoder = policy.prompt_encoder
        one_at_a_time(policy.module)
        self.policy, self.known = policy, {tuple(encoder.encode(p).ids.tolist()): p for p in prompts}
        self.fault, self.off, self.name = (lambda reply: reply), 0.0, name
        self.told: list[tuple[str, Any]] = []
        self.workers = 1
        self.received: list[dict[str, torch.Tensor]] = []  # by each worker, in every update over gloo
        self.left: int | None = None  # answers before it dies; None: it lives
        self.lock = threading.Lock()
        self.dead = threading.Event()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """Its address, the same after it was started again."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again with the weights that are on disk."""
        self.version, self.left = "default", None
        self.dead.clear()
        handler = type("Handler", (self.handler_class(),), {"stand_in": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def handler_class(self) -> type[Handler]:
        """Return the handler of requests."""
        return Handler

    def kill(self) -> None:
        """Stop answering, also what is being asked."""
        self.left = 0
        self.server.shutdown()
        self.server.server_close()
        self.dead.set()

    def receive(self, meeting: dict[str, Any]) -> None:
        """Receive tensors, as each of its workers does."""
        with ThreadPoolExecutor(self.workers) as pool:
            ranks = range(1, 1 + self.workers)
            self.received += pool.map(lambda rank: dict(mmrl_group.receive(meeting, rank)), ranks)

    def info(self) -> dict[str, Any]:
        """Describe the configuration: nothing, so that all media are sent."""
        return {}

    def load(self, weights: Path) -> None:
        """Load weights, where this stand-in does not share its policy with the learner."""

    def paths(self) -> list[str]:
        """List what it was told, without requests for answers."""
        return [path for path, _ in self.told if path != "inference/v1/generate"]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request for tokens."""
        settings = request["sampling_params"]
        if "prompt_logprobs" in settings:
            return self._scored(request["token_ids"], settings["prompt_logprobs"])
        sent = request["token_ids"]
        begins = lambda ids: sent[: len(ids)] == list(ids)
        prompt = self.known[max(filter(begins, self.known), key=len)]
        encoded = self.policy.prompt_encoder.encode(prompt)
        before = torch.tensor(sent[len(encoded.ids) :], dtype=torch.int64)
        choices = []
        for index in range(settings["n"]):
            generator = torch.Generator().manual_seed(settings["seed"] + index)
            high = min(self.policy.prompt_encoder.placeholders)
            ids = torch.randint(high, (settings["max_tokens"],), generator=generator)
            ends = torch.isin(ids, torch.tensor(settings["stop_token_ids"])).nonzero()[:, 0].tolist()
            ids = ids[: ends[0] + 1] if ends else ids
            choices.append({"index": index, **self._choice(prompt, encoded, before, ids, bool(ends))})
        return {"prompt_token_ids": request["token_ids"], "choices": choices}

    def _choice(
        self, prompt: Any, encoded: Any, before: torch.Tensor, ids: torch.Tensor, stopped: bool
    ) -> dict[str, Any]:
        row, length = TokenRow(encoded, torch.cat([before, ids]), 1.0), len(before) + len(ids)
        with torch.no_grad():
            rows = (Trajectory(prompt, prompt.uid, (Outcome(end=length),), row, length),)
            logp = (self.policy(self.policy.collate(rows)).logp[0, len(before) :] + self.off).tolist()
        content = [{"token_id": i, "logprob": p} for i, p in zip(ids.tolist(), logp, strict=True)]
        return {
            "token_ids": ids.tolist(),
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }

    def _scored(self, ids: list[int], top_k: int) -> dict[str, Any]:
        """Tell the log-probabilities of all tokens behind a known prompt, and of the likely ones."""
        if ids == [0, 0]:
            likely = {str(token): {"logprob": -1.0} for token in range(max(1, top_k))}
            return {"prompt_token_ids": ids, "prompt_logprobs": [None, likely], "choices": []}
        start, prompt = max(
            ((len(s), p) for s, p in self.known.items() if tuple(ids[: len(s)]) == s),
            key=lambda pair: pair[0],
        )
        answer = torch.tensor(ids[start:])
        row = TokenRow(self.policy.prompt_encoder.encode(prompt), answer, 1.0)
        rows = (Trajectory(prompt, prompt.uid, (Outcome(end=len(answer)),), row, len(answer)),)
        with torch.no_grad():
            output = self.policy(self.policy.collate(rows), frozenset({"top_k_ids", "top_k_logp"}))
        told: list[Any] = [None, *({} for _ in ids[1:start])]
        for place, token in enumerate(ids[start:]):
            likely = zip(*(output.extra[name][0, place, :top_k].tolist() for name in TOP_K), strict=True)
            entries = dict(likely) | {token: float(output.logp[0, place]) + self.off}
            told.append({str(token): {"logprob": value} for token, value in entries.items()})
        return {"prompt_token_ids": ids, "prompt_logprobs": told, "choices": []}


class Handler(BaseHTTPRequestHandler):
    """Reads a request and writes what the stand-in answers."""

    stand_in: StandIn

    def do_GET(self) -> None:
        """Tell the version of the weights, the number of workers and the model, or the configuration."""
        me = self.stand_in
        match urlsplit(self.path).path:
            case "/server_info":
                self._write(me.info())
            case "/get_world_size":
                self._write({"world_size": me.workers})
            case "/v1/models":
                self._write({"data": [{"id": "teacher"}]})
            case _:
                self._write({"weight_version": me.version})

    def do_POST(self) -> None:
        """Answer, or do as told."""
        me, path = self.stand_in, urlsplit(self.path).path.strip("/")
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        me.told.append((path, content))
        match path:
            case "inference/v1/generate":
                reply = me.fault(me.answer(content))
                with me.lock:
                    me.left = None if me.left is None else me.left - 1
                if me.left is not None and me.left < 0:
                    me.kill()  # before this connection closes, so that whoever sees that finds nobody here
                    return
                self._write(reply, reply.get("status", 200))
            case "v1/load_lora_adapter":
                assert (
                    content["load_inplace"] and (Path(content["lora_path"]) / "adapter_config.json").exists()
                )
                self._write({})
            case "update_weights":
                me.receive(content["update_info"])
                self._write({})
            case "collective_rpc" if content["method"] == "device_type":
                self._write({"results": [["cpu"]]})
            case "collective_rpc" if content["method"] == "receive_adapter":
                me.receive(content["kwargs"]["meeting"])
                folder = Path(tempfile.mkdtemp())
                (folder / "adapter_config.json").write_text(json.dumps(content["kwargs"]["config"]))
                self._write({"results": [[str(folder)]] * me.workers})
            case "collective_rpc":
                (weights,) = Path(content["kwargs"]["weights_path"]).glob("*.safetensors")
                me.load(weights)
                self._write({"results": [None]})
            case "update_weight_version":
                me.version = content["new_version"]
                self._write({})
            case "weight_checker":
                self._write({"checksums": {"weight": me.name}})
            case _ if path in PASSES:
                self._write({})
            case _:
                self._write({"error": f"no {path}"}, 404)

    def _write(self, reply: Any, status: int = 200) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""
