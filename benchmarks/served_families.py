"""Tiny models of all families on real vLLM servers: log-probabilities against the policy, by medium.

    python -m benchmarks.served_families --vllm .venv-vllm [--families qwen3_5,internvl]

For every family one server on a CPU; three answers of 16 tokens to each prompt, with the weights as drawn
and after a change. It writes the largest mean |dlogp| of each prompt to results/served_families.json, of
which `python -m tests.vision.family_table` makes a section of docs/families.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import processor
from benchmarks.vllm_servers import SMALL, serving
from mmrl.config.binding import Recipe
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Clock, Prompt
from mmrl.runtime.json_client import JsonClient
from mmrl.vision.engines.vllm import Vllm
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import gap
from mmrl.vision.serving.wire import SERVED
from tests.vision import tiny
from tests.vision.family_table import TRIED, makers
from tests.vision.tiny import ask, clip, picture

MAKERS = makers() | {kind: partial(tiny._glm, kind=kind) for kind in ("glm4v", "glm4v_moe")}
# vLLM's recurrent layers on a CPU compute in nothing else.
HALF = {"qwen3_5": "bfloat16", "qwen3_5_moe": "bfloat16"}
# vLLM has no class for the type, but one for the type with the same model.
FLAGS = {
    "glm46v": " --hf-overrides '"
    '{"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v"}'
    "'",
}
PROMPTS = {
    "text": ask("text", "Say a number between 1 and 9."),
    "image": ask("image", picture(seed=1, height=84, width=112), "What is this?"),
    "two images": ask("images", picture(seed=1), "and", picture(seed=2, height=84), "differ?"),
    "video": ask("video", clip(6), "When?"),
    "both": ask("both", picture(seed=3), "and", clip(5), "?"),
}


def prompts_of(family: str) -> dict[str, Prompt]:
    """Ask about texts, and about all media that servers take for a family."""
    kinds = SERVED[family].kinds
    return {
        name: prompt
        for name, prompt in PROMPTS.items()
        if {medium.kind for medium in prompt.media} <= kinds.keys()
        and (family, name) != ("smolvlm", "both")  # it reads images or videos
    }


@contextmanager
def wide_heads() -> Iterator[None]:
    """Let tiny models have heads of 32, and of 128 in recurrent layers, which vLLM needs on a CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(tiny.RECURRENT, dict.fromkeys(tiny.RECURRENT, 128)))
        for sizes in (tiny.TEXT, tiny.QWEN_VISION, tiny.TOWER):
            stack.enter_context(patch.dict(sizes, hidden_size=128))
        stack.enter_context(patch.dict(tiny.QWEN_VISION, out_hidden_size=128))
        stack.enter_context(patch.dict(tiny.MROPE, mrope_section=[8, 4, 4]))
        yield


def build(family: str, folder: Path) -> Path:
    """Write the tiny checkpoint of a family, as servers on a CPU can read it."""
    with wide_heads(), seeded(0):
        MAKERS[family](folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    # vLLM reads the names that checkpoints of the Hub have, which saving keeps.
    if family in ("llava", "llava_next", "gemma3"):
        weights = {
            name.replace("vision_tower.", "vision_tower.vision_model."): weight
            for name, weight in weights.items()
        }
    if family in HALF:  # weights of eight times the usual size are too large for 16 bits
        weights = {name: weight / (4 if weight.dim() > 1 else 1) for name, weight in weights.items()}
    save_file(weights, file, {"format": "pt"})
    return folder


def engine_of(model: Path, folder: Path, urls: list[str], given: Mapping[str, Any]) -> Vllm:
    """Make the engine over the policy with all weights trained."""
    recipe = Recipe(Piece("vision.tokens", {"model": str(model), **given}), (), 3, 0, (), Clock)
    return Vllm(
        Tokens(model=str(model), **given),
        stream=Stream(3),
        recipe=recipe,
        servers=tuple(urls),
        max_completion_length=16,
        timeout=30.0,
        weights_folder=str(folder),
    )


def shift(policy: Tokens, seed: int, size: float) -> None:
    """Add noise to all trained weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * size)


def gaps(engine: Vllm, prompts: Mapping[str, Prompt]) -> dict[str, float]:
    """Measure mean |dlogp| of three answers to each prompt."""
    rows = engine.rollout([prompt for prompt in prompts.values() for _ in range(3)])
    return {
        kind: gap(engine.policy, tuple(row for row in rows if row.prompt is prompt))
        for kind, prompt in prompts.items()
    }


def measure(family: str, home: str, folder: Path) -> dict[str, Any]:
    """Measure a family: the version of the server, the precision, and the gap of every prompt."""
    given = {"dtype": HALF.get(family, "float32"), "freeze_vision_tower": False}
    model = build(family, folder / "model")
    served = Piece("vision.tokens", {"model": str(model), **given})
    flags = SMALL + FLAGS.get(family, "")
    with serving(home, served, 1, folder, flags=flags) as (urls, _):
        client = JsonClient(f"{urls[0]}/version", request_timeout=60, request_retries=0, wait=0)
        version = json.loads(client.get())["version"]
        engine = engine_of(model, folder / "weights", urls, given)
        engine.compare = lambda even: engine.to_compare.clear()  # measure also what is refused
        first = gaps(engine, prompts_of(family))
        shift(engine.policy, 0, 0.02)
        second = gaps(engine, prompts_of(family))
    found = {kind: max(first[kind], second[kind]) for kind in first}
    return {"version": version, "dtype": given["dtype"], "gaps": found}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="environment with vLLM")
    parser.add_argument("--families", default="", help="only these, separated by commas")
    given = parser.parse_args()
    known = [name for name, family in SERVED.items() if family.kinds and name in MAKERS]
    results = json.loads(TRIED.read_text()) if TRIED.exists() else {"families": {}}
    results["processor"] = processor()
    for family in [name for name in given.families.split(",") if name] or known:
        with tempfile.TemporaryDirectory() as folder:
            results["families"][family] = found = measure(family, given.vllm, Path(folder))
        print(family, json.dumps(found), flush=True)
        TRIED.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
