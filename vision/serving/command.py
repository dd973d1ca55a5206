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
PORT = 8000


def command_lines(policy: Piece, options: Mapping[str, Any], name: str, *, cpu: bool = False) -> list[str]:
    """Write a command line for each address of `servers`.

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
    rank = given.get("lora_rank", 0)
    if given.get("adapter"):
        rank = _rank_of(str(given["adapter"]))
    if rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        room = next((size for size in RANKS if size >= rank), None)
        if room is None:
            raise ConfigError(f"`policy.lora_rank` is {rank}, and vLLM has room for at most {RANKS[-1]}")
        flags |= {"--enable-lora": None, "--max-lora-rank": str(room)}
        if not given.get("freeze_vision_tower", True):
            flags["--enable-tower-connector-lora"] = None
    if cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4"}
        # A seeded request whose prompt is prefilled in two steps crashes the server.
        flags |= {"--max-num-batched-tokens": "32768", "--block-size": "32"}
    lines = []
    for url in options["servers"]:
        at = urlsplit(url)
        where = {"--host": at.hostname or "localhost", "--port": str(at.port or PORT)}
        words = ["vllm", "serve", str(given["model"])]
        words += [word for pair in (where | flags).items() for word in pair if word is not None]
        lines.append(
            " ".join(
                [*(f"{key}={shlex.quote(value)}" for key, value in environment.items()), shlex.join(words)]
            )
        )
    return lines


def _rank_of(adapter: str) -> int:
    """Read the rank of a saved adapter."""
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(adapter)
    return config.r
