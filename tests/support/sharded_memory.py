"""Measure what two FSDP2 processes on a CPU take while they load a 16-bit model, save it and resume: `python
-m tests.support.sharded_memory`.

Prints the private memory of each before each of these, by how much it was higher at its highest, and the
bytes of its shard; the pages of files that processes share are not counted. `--lora-rank 8` trains an adapter
instead of the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from mmrl.build import build
from mmrl.config.schema import Config, parse
from mmrl.runtime.distributed import Processes
from mmrl.training.checkpointing import resume, save
from tests.support.distributed_worker import start
from tests.support.real_worker import sharding
from tests.vision import tiny

SIZES = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}  # 93 million weights
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12}


def make(folder: Path) -> None:
    """Save a model in bfloat16."""
    from transformers import AutoModelForImageTextToText

    with (
        mock.patch.dict(tiny.TEXT, SIZES | HEADS),
        mock.patch.dict(tiny.QWEN_VISION, out_hidden_size=768),
        mock.patch.dict(tiny.MROPE, mrope_section=[8, 12, 12]),
    ):
        tiny.MAKERS["qwen2_5_vl"](folder)
    AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def private() -> int:
    """Return the bytes of memory of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(plan: dict) -> None:
    """Build a run, save and resume it; print what this process takes, from before its weights are loaded."""
    before, highest = [], [0]

    def watch() -> None:
        while True:
            highest[0] = max(highest[0], private())
            time.sleep(0.003)

    def tell(what: str, **more: int) -> None:
        took = {"before": before[-1], "more": highest[0] - before[-1], **more}
        print(f"MiB {what}:", {name: round(value / 2**20) for name, value in took.items()}, flush=True)
        gc.collect()
        before.append(private())
        highest[0] = 0

    plain: Any = Processes.load_device.fget

    def loading(processes: Processes):
        if not before:  # modules that loading needs count as there before
            import peft  # noqa: F401
            from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: F401

            before.append(private())
            threading.Thread(target=watch, daemon=True).start()
        return plain(processes)

    with sharding(), mock.patch.object(Processes, "load_device", property(loading)):
        run = build(parse(plan, Config), quiet=True)
    tell("loading", shard=sum(parameter.to_local().nbytes for parameter in run.policy.module.parameters()))
    for parameter in run.learner.trained:
        parameter.grad = torch.zeros_like(parameter)
    run.learner.optimizer.step()  # makes the moments
    run.learner.optimizer.zero_grad()
    run.progress.step = 1
    tell("a step", moments=2 * sum(parameter.to_local().nbytes for parameter in run.learner.trained))
    with run.processes.watching():
        resume(run)
        tell("a new folder")
        save(run)
        tell("saving")
        resume(run)
        tell("resuming")
    os._exit(0)  # without waiting for the other process


def main() -> None:
    """Start two processes, or be one of them."""
    if "RANK" in os.environ:
        return measure(json.loads(sys.argv[1]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lora-rank", type=int, default=0)
    with TemporaryDirectory() as folder:
        make(Path(folder) / "model")
        policy = {"name": "vision.tokens", "model": f"{folder}/model", "dtype": "bfloat16"}
        plan = {
            "policy": {**policy, "lora_rank": parser.parse_args().lora_rank},
            "data": "tests.support.real_worker:seen",
            "rollout": {"engine": ["vision.generate"], "num_prompts": 2, "num_generations": 2},
            "rewards": ["tests.support.real_worker:longer"],
            "advantage": ["total", "group_normalize"],
            "objective": {"name": "policy_gradient", "surrogate": "clip", "aggregation": "step_mean"},
            "report": {"trackers": []},
            "output_dir": f"{folder}/run",
        }
        for process in start("tests.support.sharded_memory", [json.dumps(plan)], 2):
            printed = process.communicate(timeout=400)[0]
            print(*[line for line in printed.splitlines() if line.startswith("MiB")] or [printed])


if __name__ == "__main__":
    main()
