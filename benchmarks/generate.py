"""Rollouts: tokens a second of `vision.generate`, `vision.vllm`, transformers' generate, vLLM and TRL.

    python -m benchmarks.generate [--visual 64 256 1024] [--new 32 256] [--prompts 1 8] [--threads 1 2]
    python -m benchmarks.generate --turns 4 --output benchmarks/results/generate_turns.json

Eight answers of exactly so many new tokens to every prompt, one image each, by a small Qwen2.5-VL with random
weights, float32, log-probabilities of the sampled tokens included. Every repeat asks about other images, so
that no cache of an earlier one serves it, and libraries take turns, two seconds apart: a busy machine is
unfair to none, and no library's threads still spin while the next works. A rate is tokens per second of the
clock on so many cores, to which all processes are bound, prefill and vision tower included, and the median of
the repeats. "step" is one more token of all rows: the rest of a long rollout less a short one. Operators are
those that torch dispatches for a step, counted, not timed. The limit of a step on one core is the larger of
two times: its weights, keys and values, read once from memory, and its floating-point operations at the
processor's peak.

With `--turns` an answer is a conversation of so many turns, between which a tool shows half of the image;
only `vision.generate` and `vision.vllm` hold it.

Where MMRL_VLLM names an environment with vLLM, vLLM runs in process ("vllm"), and a server with the line of
`mmrl serve-command --cpu` is asked by the engine `vision.vllm` and, where that environment has TRL 1.16, by
the client of its GRPOTrainer ("trl").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from benchmarks.generate_turns import conversations
from benchmarks.machine import describe
from benchmarks.vllm_servers import family as processes_of
from benchmarks.vllm_servers import processor_seconds, serving
from mmrl.config.binding import Recipe
from mmrl.config.schema import Piece
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Frames, Media, Message, Part, Prompt
from mmrl.vision.builders.tiny_models import TinyQwen2_5Vl
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.vllm import Vllm as VllmEngine
from mmrl.vision.policies.tokens import Tokens

RESULTS = Path(__file__).parent / "results" / "generate.json"
PEERS = ["transformers", "vllm", "vision.vllm", "trl"]
CORES = os.sched_getaffinity(0)
PEER = Path(__file__).parent / "vllm_rollouts.py"
ANSWERS, QUESTION = 8, "What is shown here?"
LAYERS, WIDTH, HEADS, TOWER, VOCABULARY = 6, 256, 4, 64, 512
SETTLE = 2.0  # seconds; idle threads spin for 0.2 s, and a server works on after an answer for up to one
NUMBERS = count()  # of the images that were shown: each is encoded anew
FLAGS = "--max-model-len 2048 --max-num-batched-tokens 16384 --enforce-eager"  # of the server
Rollout = Callable[[list, int], None]  # of images, in so many tokens


@dataclass(frozen=True)
class Asked:
    """What a library is asked: images of so many visual tokens, one a prompt, and the length of answers."""

    visual: int
    prompts: int
    seed: int
    new: int
    answers: int = ANSWERS


@dataclass(frozen=True)
class Took:
    """Seconds by the clock, and of processor time of all processes that worked."""

    seconds: float
    processor: float


Measure = Callable[[Asked], Took]


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


def prompts_about(shown: list) -> list[Prompt]:
    """Ask about every image, eight times."""
    prompts = []
    for image in shown:
        frames = Frames(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], torch.zeros(1))
        media = Media("image", f"noise{next(NUMBERS)}", partial(lambda x: x, frames))
        prompts += [Prompt(media.name, (Message("user", (Part(media=media), Part(QUESTION))),))] * ANSWERS
    return prompts


def by_engine(engine: Generate | VllmEngine, turns: int) -> Rollout:
    holding = conversations(engine, turns) if turns > 1 else engine

    def rollout(shown: list, new: int) -> None:
        engine.max_completion_length = new // turns
        rows = holding.rollout(prompts_about(shown))
        assert [row.length for row in rows] == [new] * ANSWERS * len(shown)

    return rollout


def by_vllm_engine(policy: Tokens, model: Path, url: str, turns: int) -> Rollout:
    recipe = Recipe(Piece("vision.tokens", {"model": str(model)}), (), 3, 0, (), Clock)
    folder = str(model.parent / "weights")
    return by_engine(
        VllmEngine(policy, stream=Stream(0), recipe=recipe, servers=(url,), weights_folder=folder), turns
    )


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


class Peer:
    """Another library in a process of its own, which measures itself; it is asked a line of JSON at a time.

    Args:
        environment: Has vLLM.
        folder: Of the model.
        processor: Writes the prompt.
        threads: Of its matrix products.
        url: Of the server that TRL's client asks; empty: vLLM runs in the process.
    """

    def __init__(self, environment: str, folder: Path, processor: Any, threads: int, url: str = "") -> None:
        ids = processor.tokenizer(template(processor))["input_ids"]
        line = [str(Path(environment) / "bin" / "python"), str(PEER), str(folder), json.dumps(ids)]
        line += [str(threads), *([url] if url else [])]
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
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")

    def __call__(self, asked: Asked) -> Took:
        """Measure a rollout."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(vars(asked)) + "\n")
        self.process.stdin.flush()
        return Took(**self.answer())

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def timed(rollout: Rollout) -> Measure:
    def measure(asked: Asked) -> Took:
        shown = images(asked.visual, asked.prompts, asked.seed)
        start, used = time.perf_counter(), time.process_time()
        rollout(shown, asked.new)
        return Took(time.perf_counter() - start, time.process_time() - used)

    return measure


def with_server(measure: Measure, pids: set[int]) -> Measure:
    """Add the processor time of the processes of a server, which does nothing else meanwhile."""

    def measured(asked: Asked) -> Took:
        used = processor_seconds(pids)
        took = measure(asked)
        return Took(took.seconds, took.processor + processor_seconds(pids) - used)

    return measured


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
    weights = sum(p.numel() for p in model.model.language_model.layers.parameters()) + text.vocab_size * WIDTH
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
    libraries: dict[str, Measure], visual: int, prompts: int, news: list[int], repeats: int
) -> dict[str, dict[int, list[Took]]]:
    """Let libraries take turns: what every repeat took, by library and number of new tokens."""
    taken = {name: {new: [] for new in news} for name in libraries}
    for repeat in range(repeats + 1):  # the first allocates, and is not counted
        for new in news if repeat else news[:1]:
            asked = Asked(visual, prompts, 1000 * repeat + new, new)
            for name, library in libraries.items():
                time.sleep(SETTLE)
                took = library(asked)
                if repeat:
                    taken[name][new].append(took)
    return taken


def report(
    taken: dict[str, dict[int, list[Took]]], counted: dict[str, float], visual: int, prompts: int, new: int
) -> dict[str, Any]:
    """Write a line: rates, times of a step and ratios, by library."""
    line: dict[str, Any] = {"visual": visual, "new": new, "prompts": prompts, "answers": ANSWERS}
    line["threads"] = torch.get_num_threads()
    seconds = {
        name: {n: [took.seconds for took in repeats] for n, repeats in each.items()}
        for name, each in taken.items()
    }
    for name, each in seconds.items():
        news = sorted(each)
        line[name] = {
            "tokens_per_second": round(ANSWERS * prompts * new / median(each[new]), 1),
            "seconds": [round(s, 3) for s in each[new]],
            "processor_seconds": [round(took.processor, 3) for took in taken[name][new]],
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


@contextmanager
def libraries(
    folder: Path, policy: Tokens, here: dict[str, Rollout], options: Any, threads: int, versions: dict
) -> Iterator[dict[str, Measure]]:
    """Start what runs elsewhere, with so many threads; yields all libraries, and ends what was started."""
    found, environment = {name: timed(rollout) for name, rollout in here.items()}, os.environ.get("MMRL_VLLM")
    with ExitStack() as stack:

        def start(url: str = "") -> Peer:
            peer = Peer(str(environment), folder, policy.prompt_encoder.processor, threads, url)
            stack.callback(peer.end)
            versions["trl" if url else "vllm"] = peer.version
            return peer

        if environment and "vllm" in options.peers:
            found["vllm"] = start()
        if environment and {"vision.vllm", "trl"} & {*options.peers}:
            piece = Piece("vision.tokens", {"model": str(folder), "dtype": "float32"})
            servers = serving(
                environment, piece, 1, folder.parent, flags=FLAGS, cache_bytes=1 << 30, threads=threads
            )
            (url,), (server,) = stack.enter_context(servers)
            pids = processes_of(server.pid)
            if "vision.vllm" in options.peers:
                rollout = by_vllm_engine(policy, folder, url, options.turns)
                found["vision.vllm"] = with_server(timed(rollout), pids)
            if "trl" in options.peers:
                found["trl"] = with_server(start(url), pids)
        yield found


def use_cores(threads: int) -> None:
    """Bind this process, and those that it starts, to as many cores as it uses threads."""
    os.sched_setaffinity(0, sorted(CORES)[:threads])
    torch.set_num_threads(threads)


def main() -> None:
    """Measure and write lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visual", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--new", type=int, nargs="*", default=[32, 256])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="of a conversation")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if max(options.threads) > len(CORES):
        parser.error(f"--threads {max(options.threads)}: this process may use {len(CORES)} cores")
    if any(new % options.turns for new in options.new):
        parser.error("--turns must divide all of --new")
    if options.turns > 1:
        options.peers = [peer for peer in options.peers if peer == "vision.vllm"]
    use_cores(1)
    lines: list[dict] = [describe()]
    with TemporaryDirectory() as place:
        folder = Path(place) / "model"
        TinyQwen2_5Vl(
            stream=Stream(0), vocab_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS,
            vision_width=TOWER, max_pixels=1024 * 28 * 28,
        ).build(folder)  # fmt: skip
        policy = Tokens(model=str(folder), dtype="float32")
        policy.prompt_encoder.end = []  # no answer ends before its last token
        here = {"mmrl": by_engine(Generate(policy, stream=Stream(0)), options.turns)}
        if "transformers" in options.peers:
            here["transformers"] = transformers(policy, policy.prompt_encoder.processor)
        for threads in options.threads:
            use_cores(threads)
            with libraries(folder, policy, here, options, threads, lines[0]) as running:
                for prompts in options.prompts:
                    for visual in options.visual:
                        lines += measured(running, here, policy, options, visual, prompts)
                        options.output.parent.mkdir(exist_ok=True)
                        options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(
    running: dict[str, Measure],
    here: dict[str, Rollout],
    policy: Tokens,
    options: argparse.Namespace,
    visual: int,
    prompts: int,
) -> list[dict]:
    """Measure prompts of one size: a line for every number of new tokens."""
    taken, lines = measure(running, visual, prompts, options.new, options.repeats), []
    shown = images(visual, prompts, 0)
    counted = {name: operators_of_step(run, shown) for name, run in here.items()}
    for new in options.new:
        lines.append(report(taken, counted, visual, prompts, new))
        lines[-1]["turns"] = options.turns
        if torch.get_num_threads() == 1 and options.turns == 1:
            least = limit(policy.model, visual, new, prompts)
            lines[-1] |= {name: round(value, 2) for name, value in least.items()}
    print(*map(json.dumps, lines), sep="\n", flush=True)
    return lines


if __name__ == "__main__":
    sys.exit(main())
