"""Weights of a real vLLM server: seconds and bytes of an update, by folder, over gloo, and as an adapter.

    MMRL_VLLM=.venv-vllm python -m benchmarks.weight_transfer [--sizes tiny medium] [--updates 5]

A server with the line of `mmrl serve-command --cpu` gets new weights of a small Qwen2.5-VL in float32, as
`vision.vllm` brings them before every rollout: a folder on disk, a folder on /dev/shm, and
`weight_transfer: broadcast`, of the whole model and of an adapter (rank 16, language model alone). "seconds"
is what the run waits: the learner hashes its weights and writes or copies them; the server pauses, loads
them, clears its caches and goes on. "load" is the part from pause to resume. Medians of the updates after the
first. At the end log-probabilities of answers are compared with the policy's ("gap", nats a token).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.vllm_servers import serving
from mmrl.config.binding import Recipe
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Message, Part, Prompt
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.vllm import Vllm
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import gap

RESULTS = Path(__file__).parent / "results" / "weight_transfer.json"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vision_width": 128},
    "medium": {"width": 768, "heads": 12, "layers": 8, "vision_width": 512, "vision_layers": 6},
}
WHOLE: dict[str, Any] = {"freeze_vision_tower": False}
LORA: dict[str, Any] = {"lora_rank": 16}
WAYS = {
    "folder on disk": (WHOLE, "folder", ""),
    "folder on /dev/shm": (WHOLE, "folder", "/dev/shm"),
    "broadcast": (WHOLE, "broadcast", ""),
    "adapter, folder on disk": (LORA, "folder", ""),
    "adapter, broadcast": (LORA, "broadcast", ""),
}
PROMPT = Prompt("text", (Message("user", (Part("Say a number between 1 and 9."),)),))


def measure(model: Path, url: str, folder: Path, way: str, updates: int) -> dict[str, float]:
    """Bring a server new weights so many times, in one way."""
    given, transfer, place = WAYS[way]
    policy = Tokens(model=str(model), dtype="float32", **given)
    recipe = Recipe(Piece("vision.tokens", {"model": str(model), **given}), (), 3, 0, (), Clock)
    options: dict[str, Any] = {"weight_transfer": transfer, "max_completion_length": 16}
    with TemporaryDirectory(dir=place or folder) as weights:
        engine = Vllm(
            policy, stream=Stream(3), recipe=recipe, servers=(url,), weights_folder=weights, **options
        )
        loads: list[float] = []
        load = engine.asking.servers[0].load

        def timed(brought: Any) -> None:
            start = time.perf_counter()
            load(brought)
            loads.append(time.perf_counter() - start)

        engine.asking.servers[0].load = timed
        seconds = []
        for update in range(1 + updates):
            generator = torch.Generator().manual_seed(update)
            with torch.no_grad():
                for weight in policy.module.parameters():
                    if weight.requires_grad:
                        weight.add_(torch.randn(weight.shape, generator=generator) * 0.01)
            start = time.perf_counter()
            engine.load_weights()
            seconds.append(time.perf_counter() - start)
        size = engine.pop_metrics()["vllm/publish_bytes"] / len(seconds)
        found = {"bytes": size, "seconds": median(seconds[1:]), "load": median(loads[1:])}
        return {**found, "gap": gap(policy, engine.rollout([PROMPT] * 4))}


def main() -> None:
    """Measure all sizes and ways, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    home, results = os.environ["MMRL_VLLM"], dict[str, Mapping[str, Any]]()
    torch.set_num_threads(1)
    for size in arguments.sizes:
        with TemporaryDirectory() as name:
            folder, rows = Path(name), {}
            built = TinyQwen2_5Vl(stream=Stream(3), init=0.02, **SIZES[size]).build(folder / "model")
            for given in (WHOLE, LORA):
                piece = Piece("vision.tokens", {"model": str(folder / "model"), "dtype": "float32", **given})
                options = {"weight_transfer": "broadcast"}
                with serving(home, piece, 1, folder, options=options) as ((url,), _):
                    for way in (way for way, (other, *_) in WAYS.items() if other is given):
                        rows[way] = measure(folder / "model", url, folder, way, arguments.updates)
                        print(size, way, rows[way], flush=True)
            results[size] = {"parameters": built["parameters"], "ways": rows}
    report = {"machine": describe(), "updates": arguments.updates, "sizes": results}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
