"""Which files five real runs enter, how many calls return, and how deep they go: `python -m tests.trace`.

Each run is a command of users with tiny models of real classes: GRPO of Qwen2.5-VL, Flow-GRPO, a conversation
with tools, a build of preference pairs, an evaluation of a pruned model. A file counts where a function of it
runs; what importing a file runs does not count. `python -m tests.trace train run.yaml` traces one command.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
WINGS = ("mmrl", "vision", "diffusion", "compression")
SCORE = "mmrl/training/score.py"
# Parts of the names of files that a plain run has nothing to do with.
FOREIGN = (
    "mmrl/papers/",
    "tool",
    "conversation",
    "call_formats",
    "/ray",
    "steering",
    "training/ahead",
    "vllm",
)
QUIET = {"trackers": [], "startup_checks": [], "checks": []}
MODEL = {"name": "vision.tokens", "model": "model", "dtype": "float32", "freeze_vision_tower": False}
DATA = {"name": "vision.visual_qa", "path": "rows.jsonl"}
GENERATE = {"name": "vision.generate", "max_completion_length": 8}
FLOW_SIZE = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16}


@dataclass
class Trace:
    """What one run entered: calls by file, wings that reward calls cross, and the deepest stack."""

    calls: Counter[str] = field(default_factory=Counter)
    returns: int = 0
    depth: int = 0
    reward_wings: set[str] = field(default_factory=set)

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call or return of a function of the project (a profile function of `sys.setprofile`)."""
        file = file_of(frame) if event in ("call", "return") else ""
        if not file or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # bodies of modules and classes
            return
        if event == "return":
            self.returns += 1
            return
        stack = [file]
        above: FrameType | None = frame
        while above := above.f_back:
            if other := file_of(above):
                if not above.f_code.co_flags & inspect.CO_OPTIMIZED:
                    return  # called while a module is imported
                stack.append(other)
        self.calls[file] += 1
        self.depth = max(self.depth, len(stack))
        if "/rewards/" in file and SCORE in stack:
            self.reward_wings |= {wing_of(one) for one in stack[: stack.index(SCORE)]}


def file_of(frame: FrameType) -> str:
    """The file of a frame from the project's root, by its real place; empty for other code."""
    name = _real(frame.f_code.co_filename)
    return name if name.split("/", 1)[0] in WINGS else ""


_PLACES: dict[str, str] = {}


def _real(name: str) -> str:
    if name not in _PLACES:
        path = Path(name).resolve() if name.startswith("/") else Path(name)
        _PLACES[name] = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return _PLACES[name]


def wing_of(file: str) -> str:
    """The wing of a file: a folder of mmrl/, or one of the sibling packages."""
    first, *rest = file.split("/")
    return first if first != "mmrl" else "/".join([first, *rest[:1]])


def traced(arguments: Sequence[str]) -> Trace:
    """Run one `mmrl` command in this process, and trace it in all threads."""
    trace = Trace()
    threading.setprofile(trace.see)
    sys.setprofile(trace.see)
    try:
        command(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return trace


def command(arguments: Sequence[str]) -> None:
    """Run one `mmrl` command in this process; raise `SystemExit` where it fails."""
    from mmrl.cli import main

    if code := main(list(arguments)):
        raise SystemExit(code)


def write(name: str, content: dict) -> str:
    """Write a configuration of the current folder as JSON, which is YAML."""
    Path(name).write_text(json.dumps(content))
    return name


def prepare() -> None:
    """Build tiny models, images and rows in the current folder."""
    rows = []
    for i, colour in enumerate(["red", "blue", "green", "black"]):
        Image.new("RGB", (56, 56), colour).save(f"{i}.png")
        rows.append({"image": f"{i}.png", "question": "What is shown?", "answer": colour})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    captions = [{"prompt": f"a {row['answer']} square"} for row in rows]
    Path("captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captions))
    words = ["user What is shown? assistant a red circle", "user Where? assistant a blue square"]
    builds = {
        "model": {"name": "vision.tiny_qwen2_5_vl", "texts": words},
        "flow": {
            "name": "diffusion.tiny_flow_model",
            "texts": "captions.jsonl",
            "side": 16,
            "patch": 4,
            "text_length": 6,
        },
    }
    for output, build in builds.items():
        command(["build", write(f"{output}.yaml", {"build": build, "output": output})])


def training(method: str, **keys: Any) -> dict:
    """One step of a method, without reports beside it."""
    run = {"include": [f"methods/{method}.yaml"], "max_steps": 1, "report": QUIET, "save_steps": 0}
    run |= {"learn": {"on_no_learning": "warn"}, "group_filter": "keep_all", "metrics": []}
    return run | keys


def runs() -> dict[str, tuple[str, dict]]:
    """The five runs: title to command and configuration."""
    reward = [{"name": "vision.short_answer", "form": "text"}]
    tools = {"name": "vision.with_tools", "tool": ["vision.crop"], "max_turns": 2}
    pruned = {**MODEL, "transform": [{"name": "compression.drop_visual_layers", "after": 1}]}
    few = {"num_prompts": 2, "num_generations": 2}
    return {
        "Qwen2.5-VL GRPO": (
            "train",
            training(
                "grpo/grpo", policy=MODEL, data=DATA, rewards=reward, rollout={**few, "engine": [GENERATE]}
            ),
        ),
        "Flow-GRPO": (
            "train",
            training(
                "flow/flow_grpo",
                policy={
                    "name": "diffusion.flow",
                    "model": "flow",
                    "dtype": "float32",
                    "max_sequence_length": 6,
                },
                data={"name": "diffusion.prompts", "path": "captions.jsonl"},
                rewards=["diffusion.jpeg_compressibility"],
                rollout={**few, "engine": {"0": FLOW_SIZE}},
            ),
        ),
        "tool conversation": (
            "train",
            training(
                "grpo/grpo",
                policy=MODEL,
                data=DATA,
                rewards=reward,
                rollout={**few, "engine": [GENERATE, tools]},
            ),
        ),
        "pair build": (
            "build",
            {
                "build": {
                    "name": "vision.clip_pairs",
                    "source": "rows.jsonl",
                    "prompts": ["What is shown?"],
                    "model": MODEL,
                    "engines": [GENERATE],
                    "scores": {"name": "repetition_penalty"},
                },
                "output": "pairs",
            },
        ),
        "pruned evaluation": (
            "evaluate",
            {
                "policy": pruned,
                "evaluation": {"data": DATA, "engine": [GENERATE], "rewards": ["exact_match"]},
            },
        ),
    }


def main(arguments: Sequence[str]) -> None:
    """Print a line a run, and then the files of each wing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments:
        report(" ".join(arguments), traced(arguments))
        return
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        prepare()
        every: set[str] = set()
        for title, (name, run) in runs().items():
            run = run if name == "build" else {**run, "output_dir": f"out/{title.replace(' ', '_')}"}
            trace = traced([name, write("run.yaml", run)])
            every |= trace.calls.keys()
            report(title, trace)
    print(f"all five: {len(every)} files")


def report(title: str, trace: Trace) -> None:
    """Print how many files, returns and frames a run takes, and its files by wing."""
    wings = Counter(wing_of(file) for file in trace.calls)
    foreign = sorted(file for file in trace.calls if any(name in file for name in FOREIGN))
    print(f"{title}: {len(trace.calls)} files, {trace.returns:,} returns, {trace.depth} frames deep")
    print("  " + ", ".join(f"{wing} {count}" for wing, count in wings.most_common()))
    print(f"  a reward call crosses: {', '.join(sorted(trace.reward_wings)) or 'nothing'}")
    print(f"  of papers, tools, Ray, steering and prefetching: {', '.join(foreign) or 'nothing'}")


if __name__ == "__main__":
    main(sys.argv[1:])
