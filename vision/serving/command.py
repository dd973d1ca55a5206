"""Command lines that start vLLM servers for the policy of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mmrl.config.loading import ConfigError
from mmrl.config.schema import Piece

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank in vLLM 0.32


def command_lines(policy: Piece, options: Mapping[str, Any], name: str, *, cpu: bool = False) -> list[str]:
    """Return the command lines that start the servers, one per address in `servers`.

    Args:
        policy: The policy of the run, `vision.tokens`.
        options: Options of the engine.
        name: Name of the model on the server.
        cpu: Whether the servers run on CPUs, which must prefill a prompt in one step.
    """
    given = policy.options
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables requests that change weights, caches and versions
        "PYTHONPATH": str(Path(__file__).parent / "worker"),
    }
    flags = {
        "--served-model-name": name,
        "--dtype": given.get("dtype", "bfloat16"),
        "--enable-scale-out": None,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--worker-extension-cls": "mmrl_vllm_worker.Reloadable",
    }
    if rank := lora_rank(policy):
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        flags |= lora_flags(rank)
        if not given.get("freeze_vision_tower", True):
            flags["--enable-tower-connector-lora"] = None
    if options.get("weight_transfer") == "broadcast":
        flags["--weight-transfer-config"] = '{"backend": "mmrl"}'
    if rate := options.get("video_pruning_rate"):
        flags["--video-pruning-rate"] = str(rate)
    if options.get("sleep_level") and not cpu:  # vLLM refuses the flag on a CPU
        flags["--enable-sleep-mode"] = None
    if cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4"}
        # A seeded request whose prompt is prefilled in two steps crashes the server.
        flags |= {"--max-num-batched-tokens": "32768", "--block-size": "32"}
    lines = []
    for url in options["servers"]:
        at = urlsplit(url)
        where = {"--host": at.hostname or "localhost", "--port": str(port_of(url))}
        words = ["vllm", "serve", str(given["model"])]
        words += [word for pair in (where | flags).items() for word in pair if word is not None]
        lines.append(
            " ".join(
                [*(f"{key}={shlex.quote(value)}" for key, value in environment.items()), shlex.join(words)]
            )
        )
    return lines


def lora_rank(policy: Piece) -> int:
    """Return the rank of the policy's adapter (of a saved adapter: from its files); 0 without an adapter."""
    if not policy.options.get("adapter"):
        return policy.options.get("lora_rank", 0)
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(policy.options["adapter"]))
    return config.r


def lora_flags(rank: int) -> dict[str, str | None]:
    """Return the flags of vLLM for adapters of this rank; raise `ConfigError` if it is too large."""
    room = next((size for size in RANKS if size >= rank), None)
    if room is None:
        raise ConfigError(f"`policy.lora_rank` is {rank}, and vLLM has room for at most {RANKS[-1]}")
    return {"--enable-lora": None, "--max-lora-rank": str(room)}


def port_of(url: str) -> int:
    """Return the port of an address; by default 443 for https and 80 for http."""
    at = urlsplit(url)
    return at.port or (443 if at.scheme == "https" else 80)
