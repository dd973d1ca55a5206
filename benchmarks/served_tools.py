"""The demo of tools with and without a server: the same accuracy within chance.

    MMRL_VLLM=.venv-vllm python -m benchmarks.served_tools [--photographs .venv/photographs] [--seeds 2]

Photographs, model and habits are those of `make demo-tools`, but heads have 32 numbers, which vLLM needs on
a CPU. From every start, GRPO learns twice: with `vision.generate` in this process, and with `vision.vllm`,
whose server gets the weights after each update. The draws of both differ. Intervals are over the held-out
questions, those of the difference over paired questions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.vllm_servers import serving
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import build
from examples.visual_tools.demo import HERE, begin, learn
from mmrl.config.schema import Piece

RESULTS = Path(__file__).parent / "results" / "served_tools.json"
HEADS = ["build.heads=2", "build.vision_width=128"]
WAYS = ("vision.generate", "vision.vllm")


def served(url: str, folder: Path) -> list[str]:
    """Return the overrides that let a run sample on a server."""
    options = {"name": "vision.vllm", "max_completion_length": 16, "servers": f"[{url}]"}
    options["weights_folder"] = str(folder)
    return [f"rollout.engine[0].{name}={value}" for name, value in options.items()]


def trained(output: Path, seed: int, environment: str, overrides: list[str]) -> dict[str, Any]:
    """Train one start both ways; return accuracies per question and seconds."""
    model, measured = begin("imitation", output, seed, {"model": HEADS})
    found: dict[str, Any] = {"start": measured["accuracy"]}
    piece = Piece("vision.tokens", {"model": str(model), "dtype": "float32"})
    for way in WAYS:
        options = [f"policy.model={model}", *overrides]
        began = time.perf_counter()
        if way == "vision.generate":
            _, each, _ = learn("grpo", output / "local", seed, options)
        else:
            with serving(environment, piece, 1, output) as ((url,), _):
                began = time.perf_counter()
                _, each, _ = learn("grpo", output / "served", seed, options + served(url, output / "weights"))
        found[way] = each["accuracy"]
        found[f"{way} seconds"] = round(time.perf_counter() - began, 1)
    return found


def main() -> None:
    """Measure and write lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", default=".venv/photographs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to both runs")
    options = parser.parse_args()
    environment = os.environ["MMRL_VLLM"]
    with TemporaryDirectory() as place:
        output = Path(place)
        build(f"{HERE}/objects.yaml", output / "objects", 0)
        where = [f"build.objects={output / 'objects/heart'}", f"build.photographs={options.photographs}"]
        build(f"{HERE}/signs.yaml", output / "signs", 0, where)
        for way in ("local", "served"):
            (output / way).mkdir()
            (output / way / "signs").symlink_to(output / "signs")
        seeds = [trained(output, seed, environment, options.overrides) for seed in range(options.seeds)]
    line: dict[str, Any] = {"seeds": options.seeds, "overrides": options.overrides}
    for name in ("start", *WAYS):
        mean, interval = mean_with_interval(torch.stack([seed[name] for seed in seeds]).mean(0))
        line[name] = {"accuracy": mean, "interval": list(interval)}
        line[name]["by seed"] = [float(seed[name].mean()) for seed in seeds]
        line[name]["seconds"] = [seed[f"{name} seconds"] for seed in seeds if f"{name} seconds" in seed]
    apart = torch.stack([seed[WAYS[1]] - seed[WAYS[0]] for seed in seeds]).mean(0)
    mean, interval = mean_with_interval(apart)
    line["difference"] = {"accuracy": mean, "interval": list(interval)}
    print(json.dumps(line, indent=1))
    options.output.write_text("".join(json.dumps(each) + "\n" for each in (describe(), line)))


if __name__ == "__main__":
    sys.exit(main())
