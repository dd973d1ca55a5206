"""What `mmrl estimate-memory` says, beside what a training run takes: weights, gradients, optimizer, cache.

    python -m benchmarks.memory [--cases full lora] [--width 512] [--output FILE]

Every case is a process of its own. It first trains a much smaller model for a step, so that libraries are
loaded, then notes its memory and trains two steps (the second one has the state of the optimizer).
"measured" is the peak less the note: on a CPU of memory that is not mapped from files, looked at every
millisecond; on a GPU of what torch allocated. "estimated" is made before the first step, from passes over a
few short rows. The end token is taken away, so that all answers have the full length, as the estimate
assumes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.grpo_step import make_data
from benchmarks.machine import processor

RESULTS = Path(__file__).parent / "results" / "memory.json"
LAYERS, HEADS, TOWER, VOCABULARY = 6, 8, 64, 8192
VISUAL = 64
# Options of the policy, and of the run: prompts, answers, their length, steps of a micro-batch, references.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {"num_prompts": 2, "length": 48}),
    "bfloat16": ({"dtype": "bfloat16"}, {"num_prompts": 2, "length": 48}),
    "micro-batches": ({}, {"num_prompts": 4, "length": 48, "micro": 512}),
    "reference": ({}, {"num_prompts": 2, "length": 24, "micro": 256, "reference": True}),
    "adapter": ({"lora_rank": 8}, {"num_prompts": 4, "length": 48}),
    "checkpointing": (
        {"lora_rank": 8, "gradient_checkpointing": True},
        {"num_prompts": 4, "length": 48, "micro": 2048},
    ),
    "few bits": (
        {"lora_rank": 8, "transform": ["compression.bnb_quantize"]},
        {"num_prompts": 4, "length": 48},
    ),
    "pruned": (
        {"lora_rank": 8, "transform": [{"name": "compression.tome", "keep": 0.25}]},
        {"num_prompts": 4, "length": 48},
    ),
}
# Freed blocks go back to the system at once, so that resident memory is what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def make_model(folder: Path, width: int, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> Path:
    """Write a small Qwen2.5-VL with random weights, whose vocabulary is larger than its tokenizer's."""
    from transformers import AutoModelForImageTextToText

    from mmrl.core.rng import Stream
    from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl

    path = folder / f"model-{width}"
    TinyQwen2_5Vl(
        stream=Stream(0), width=width, layers=layers, heads=HEADS, vision_width=TOWER,
        max_pixels=1024 * 28 * 28,
    ).build(path)  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocabulary)
    model.save_pretrained(path)
    return path


def make_config(folder: Path, model: Path, options: dict[str, Any], run: dict[str, Any]) -> Any:
    """Make the configuration of a case."""
    from mmrl.config.schema import Config, Learn, Piece, Rollout

    return Config(
        policy=Piece("vision.tokens", {"model": str(model), "dtype": "float32", **options}),
        data=Piece("vision.visual_qa", {"path": str(make_data(folder, VISUAL, 64))}),
        rollout=Rollout(
            (Piece("vision.generate", {"max_completion_length": run["length"]}),),
            num_prompts=run["num_prompts"],
            num_generations=8,
        ),
        rewards=(Piece("benchmarks.grpo_step:variety"),),
        advantage=(Piece("total"), Piece("group_normalize")),
        objective=Piece("policy_gradient", {"surrogate": "clip", "aggregation": "sequence_mean"}),
        references={"ref": Piece("frozen")} if run.get("reference") else {},
        learn=Learn(1e-6, micro_batch_steps=run.get("micro", 1 << 20)),
        max_steps=2,
        output_dir=str(folder / "run"),
        overwrite_output_dir=True,
    )


def now() -> float:
    """Read the memory that this process holds, in bytes: of torch on a GPU, else without mapped files."""
    if torch.cuda.is_available():
        return float(torch.cuda.memory_allocated())
    # The kernel takes mapped files, such as libraries, out of memory and back as it likes.
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return 4096.0 * (resident - shared)


class Peak(threading.Thread):
    """Notes the largest memory while a block runs: on a CPU the largest of a look every millisecond."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.largest = now()
        self.ended = threading.Event()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.start()
        return self

    def run(self) -> None:
        while not self.ended.wait(1e-3):
            self.largest = max(self.largest, now())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()
        if torch.cuda.is_available():
            self.largest = float(torch.cuda.max_memory_allocated())


def take_steps(config: Any, count: int) -> Any:
    """Build a run and take steps."""
    from benchmarks.grpo_step import step_once
    from mmrl.build import build

    run = build(config, quiet=True)
    run.policy.prompt_encoder.end = [-1]
    for tensor in (*run.policy.module.parameters(), *run.policy.module.buffers()):
        tensor.data = tensor.data.clone()  # weights that nobody changed are still mapped from their file
    for number in range(count):
        step_once(run, number)
    return run


def measure(name: str, width: int, layers: int = LAYERS) -> dict[str, Any]:
    """Measure one case in this process."""
    from mmrl.diagnostics.memory_estimates import estimate_memory, peak

    options, settings = CASES[name]
    with TemporaryDirectory() as place:
        folder = Path(place)
        config = make_config(folder, make_model(folder, width, layers), options, settings)
        small = make_config(folder, make_model(folder, 64, 2, 512), options, {**settings, "length": 8})
        take_steps(small, 1)
        estimate = dict(estimate_memory(config))
        with Peak() as peak_of:
            run = take_steps(config, 2)
        measured = peak_of.largest - peak_of.before
        parameters = sum(p.numel() for p in run.policy.module.parameters())
    estimated = peak(estimate)
    return {
        "case": name,
        "parameters": parameters,
        "measured_mb": round(measured / 1e6, 1),
        "estimated_mb": round(estimated / 1e6, 1),
        "estimated_over_measured": round(estimated / measured, 3),
        "parts_mb": {part: round(size / 1e6, 1) for part, size in estimate.items()},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
    }


def measure_apart(name: str, width: int, layers: int = LAYERS) -> dict[str, Any]:
    """Measure one case in a process of its own."""
    code = (
        "import json; from benchmarks.memory import measure; "
        f"print(json.dumps(measure({name!r}, {width}, {layers})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the case '{name}' failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure the cases, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    lines = []
    for name in given.cases:
        lines.append(measure_apart(name, given.width))
        print(json.dumps(lines[-1]), flush=True)
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
