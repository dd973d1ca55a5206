"""Rollouts: tokens a second of `vision.generate`, of transformers' generate and of vLLM in process.

    python -m benchmarks.generate [--visual 64 256 1024] [--new 32 256] [--prompts 1 8] [--repeats 3]

Eight answers of exactly so many new tokens to every prompt, one image each, by a small Qwen2.5-VL with random
weights; one core, one thread, float32, log-probabilities of the sampled tokens included. Every repeat asks
about other images, so that no cache of an earlier one serves it, and libraries take turns, so that a busy
machine is unfair to none; a rate is tokens per second of processor time of the process, prefill and vision
tower included, and the median of the repeats. "step" is one more token of all rows: the rest of a long
rollout less a short one. Operators are those that torch dispatches for a step, counted, not timed. The limit
of a step is the larger of two times: its weights, keys and values, read once from memory, and its
floating-point operations at the processor's peak. vLLM runs where MMRL_VLLM names an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decode_step import copy_rate
from benchmarks.machine import describe
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.generate import Generate
from mmrl.vision.policies.tokens import Tokens

RESULTS = Path(__file__).parent / "results" / "generate.json"
PEER = Path(__file__).parent / "vllm_rollouts.py"
ANSWERS, QUESTION = 8, "What is shown here?"
LAYERS, WIDTH, HEADS, TOWER, VOCABULARY = 6, 256, 4, 64, 512
NUMBERS = count()  # of the images that were shown: each is encoded anew
Rollout = Callable[[list, int], None]  # of images, in so many tokens


class CountOperators(TorchDispatchMode):
    """Counts the operators that torch dispatches, views included."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def images(visual: int, count: int, seed: int) -> list:
    """Make images of noise, of so many visual tokens each."""
    from PIL import Image

    draw, side = torch.Generator().manual_seed(seed), 28 * round(visual**0.5)
    shape = (side, side, 3)
    noise = (torch.randint(0, 255, shape, generator=draw, dtype=torch.uint8) for _ in range(count))
    return [Image.fromarray(pixels.numpy()) for pixels in noise]


def ours(policy: Tokens) -> Rollout:
    def rollout(shown: list, new: int) -> None:
        prompts = []
        for image in shown:
            frames = Frames(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], torch.zeros(1))
            media = Media("image", f"noise{next(NUMBERS)}", partial(lambda x: x, frames))
            prompts.append(Prompt(media.name, (Message("user", (Part(media=media), Part(QUESTION))),)))
        engine = Generate(policy, stream=Stream(0), max_completion_length=new)
        rows = engine.rollout([prompt for prompt in prompts for _ in range(ANSWERS)])
        assert {row.length for row in rows} == {new}

    return rollout


def transformers(policy: Tokens, processor: Any) -> Rollout:
    @torch.no_grad()
    def rollout(shown: list, new: int) -> None:
        inputs = processor(images=shown, text=[template(processor)] * len(shown), return_tensors="pt")
        out = policy.model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
            min_new_tokens=new,
            num_return_sequences=ANSWERS, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logp = torch.stack(out.logits, 1).log_softmax(-1)
        assert logp.gather(2, out.sequences[:, -new:, None]).shape == (ANSWERS * len(shown), new, 1)

    return rollout


def template(processor: Any) -> str:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


class Vllm:
    """vLLM in a process of its own, which measures itself; it is asked a line of JSON at a time."""

    def __init__(self, environment: str, folder: Path, processor: Any) -> None:
        ids = processor.tokenizer(template(processor))["input_ids"]
        line = [str(Path(environment) / "bin" / "python"), str(PEER), str(folder), json.dumps(ids)]
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept
        )
        self.version = self.answer()["version"]

    def answer(self) -> dict:
        """Read the next line that is JSON; others are the library's."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"vLLM ended with {self.process.wait()}")

    def seconds(self, visual: int, prompts: int, seed: int, new: int) -> float:
        """Measure a rollout: seconds of processor time."""
        question = {"visual": visual, "prompts": prompts, "seed": seed, "new": new, "answers": ANSWERS}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()["seconds"]


def timed(rollout: Rollout, shown: list, new: int) -> float:
    start = time.process_time()
    rollout(shown, new)
    return time.process_time() - start


def operators_of_step(rollout: Rollout, shown: list) -> float:
    """Count the operators of a further token of all rows."""
    counts = []
    for new in (8, 24):
        with CountOperators() as counter:
            rollout(shown, new)
        counts.append(counter.count)
    return (counts[1] - counts[0]) / 16


def limit(model: torch.nn.Module, visual: int, new: int, prompts: int) -> dict[str, float]:
    """Compute the least seconds of a step, of mean length, by memory and by operations."""
    text = model.config.get_text_config(decoder=True)
    weights = sum(p.numel() for p in model.model.language_model.layers.parameters()) + VOCABULARY * WIDTH
    kept = 2 * text.num_hidden_layers * text.num_key_value_heads * (WIDTH // HEADS)
    rows = ANSWERS * prompts
    read = 4 * (weights + kept * (prompts * visual + rows * new / 2))
    products = 2 * rows * (weights + 2 * text.num_hidden_layers * WIDTH * (visual + new / 2))
    machine = describe()
    peak = 1e9 * max(float(v) for name, v in machine.items() if name.endswith("_gflops"))
    return {
        "megabytes": read / 1e6,
        "mflop": products / 1e6,
        "limit_ms": 1e3 * max(read / copy_rate(), products / peak),
    }


def measure(
    runs: dict[str, Rollout], peer: Vllm | None, visual: int, prompts: int, news: list[int], repeats: int
) -> dict[str, dict[int, list[float]]]:
    """Let libraries take turns: seconds of every repeat, by library and number of new tokens."""
    names = [*runs, *(["vllm"] if peer else [])]
    seconds = {name: {new: [] for new in news} for name in names}
    for repeat in range(repeats + 1):  # the first allocates, and is not counted
        for new in news if repeat else news[:1]:
            shown = images(visual, prompts, seed := 1000 * repeat + new)
            for name in names:
                if name in runs:
                    took = timed(runs[name], shown, new)
                else:
                    took = peer.seconds(visual, prompts, seed, new)
                if repeat:
                    seconds[name][new].append(took)
    return seconds


def report(
    seconds: dict[str, dict[int, list[float]]], counted: dict[str, float], visual: int, prompts: int, new: int
) -> dict[str, Any]:
    """Write a line: rates, times of a step and ratios, by library."""
    line: dict[str, Any] = {"visual": visual, "new": new, "prompts": prompts, "answers": ANSWERS}
    for name, each in seconds.items():
        took, news = median(each[new]), sorted(each)
        line[name] = {
            "tokens_per_second": round(ANSWERS * prompts * new / took, 1),
            "seconds": [round(s, 3) for s in each[new]],
        }
        if name in counted:
            line[name]["operators_of_step"] = round(counted[name])
        if len(news) > 1:
            step = (median(each[news[-1]]) - median(each[news[0]])) / (news[-1] - news[0])
            line[name]["step_ms"] = round(1e3 * step, 2)
        if name != "mmrl":
            ratios = (other / own for own, other in zip(seconds["mmrl"][new], each[new], strict=True))
            line[name]["mmrl_times_faster"] = round(median(ratios), 2)
    return line


def main() -> None:
    """Measure and write lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visual", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--new", type=int, nargs="*", default=[32, 256])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=["transformers", "vllm"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict] = [describe()]
    with TemporaryDirectory() as place:
        folder = Path(place) / "model"
        TinyQwen2_5Vl(
            stream=Stream(0), vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS,
            vision_width=TOWER, max_pixels=1024 * 28 * 28,
        ).build(folder)  # fmt: skip
        policy = Tokens(model=str(folder), dtype="float32")
        policy.prompt_encoder.end = [-1]  # no answer ends before its last token
        processor = policy.prompt_encoder.processor
        runs = {"mmrl": ours(policy)}
        if "transformers" in options.peers:
            runs["transformers"] = transformers(policy, processor)
        peer = None
        if "vllm" in options.peers and (environment := os.environ.get("MMRL_VLLM")):
            peer = Vllm(environment, folder, processor)
            lines[0]["vllm"] = peer.version
        for prompts in options.prompts:
            for visual in options.visual:
                seconds = measure(runs, peer, visual, prompts, options.new, options.repeats)
                shown = images(visual, prompts, 0)
                counted = {name: operators_of_step(run, shown) for name, run in runs.items()}
                for new in options.new:
                    lines.append(report(seconds, counted, visual, prompts, new))
                    least = limit(policy.model, visual, new, prompts)
                    lines[-1] |= {name: round(value, 2) for name, value in least.items()}
                print(*map(json.dumps, lines[-len(options.new) :]), sep="\n", flush=True)
                options.output.parent.mkdir(exist_ok=True)
                options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if peer:
            peer.process.stdin.close()
            peer.process.wait()


if __name__ == "__main__":
    sys.exit(main())
