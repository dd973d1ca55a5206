"""Every file of methods takes two steps, on tiny models and the data, engines and games of the library."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.build import build
from mmrl.config.binding import Pieces
from mmrl.config.loading import merge, read
from mmrl.config.registry import find
from mmrl.config.schema import Config, as_piece, parse
from mmrl.core.rng import Stream
from mmrl.core.types import Outcome, Prompt
from mmrl.data.dataset_io import write_rows
from mmrl.rewards.adapters import per_outcome
from mmrl.training.loop import train
from mmrl.vision.models import loading
from tests.rewards import tiny_clip
from tests.rewards.tiny_text import write_bert
from tests.support.configs import METHODS, reads_scores
from tests.support.judging import scripted

# Texts that are one token each, so that a random model writes calls, tasks, decisions and claims.
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WRITTEN = [
    *(
        CALL.format("move", json.dumps({"direction": way, "cells": cells}))
        for way in ("up", "down", "left", "right")
        for cells in range(1, 11)
    ),
    *(f"<task>count {thing}</task>" for thing in range(40)),
    *("keep", " keep", "\\boxed{1}", "\\boxed{2}", "\\boxed{1, 2}", ".\n\n", "\n\n", "</think>", "<think>"),
]
ROW = {
    "answer": "2",
    "hints": [f"hint {i}" for i in range(12)],
    "solution": "One. Two. Three. Four.",
    "reference": "one and one is two",
    "paraphrases": ["how many", "what number"],
    "predicted": 0.5,
    "criteria": ["Is right.", "Is short."],
    "entities": ["two"],
    "tests": ["a", "b"],
    "calls": [{"name": "move", "arguments": {"direction": "up"}}],
}
ACTION = '{"action": "click", "bbox": [0.1, 0.2, 0.3, 0.3]}'
STEPS = [
    {"step_type": "ret", "system": "s", "problem": "<image>Origin question: a",
     "answer": {"query": "b", "retriever": ["Text Retriever"]}},
    {"step_type": "ans", "problem": "c", "answer": ["d"]},
]  # fmt: skip
FEW_STEPS = 5  # of denoising, where some are stochastic
SMALL = {"vision_width": 16, "vision_layers": 1, "width": 32, "layers": 1}


def write_video(path: Path) -> None:
    """Write two seconds of video."""
    import av

    with av.open(str(path), "w") as output:
        stream = output.add_stream("mpeg4", rate=4)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(8):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (30 * i, 90, 90)))
            frame.pts, frame.time_base = i, Fraction(1, 4)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Build the models and the data of all runs."""
    home = tmp_path_factory.mktemp("home")
    for i in range(4):
        Image.new("RGB", (28, 28), (60 * i, 90, 200 - 50 * i)).save(home / f"{i}.png")
    mask = Image.new("L", (28, 28))
    mask.paste(255, (6, 6, 20, 20))
    mask.save(home / "mask.png")
    write_video(home / "a.mp4")
    asked = [{"id": f"r{i}", "question": f"number {i}", "image": f"{i}.png"} for i in range(4)]
    signals = [{"satisfaction": 3}, {"failures": 6}] * 2
    rows = {
        "questions": [
            {**row, **ROW, "source": "ab"[i % 2], "signals": signals[i]} for i, row in enumerate(asked)
        ],
        "actions": [{**row, "answer": ACTION} for row in asked],
        "called": [{**row, "answer": json.dumps(ROW["calls"][0])} for row in asked],
        "layers": [
            {"foreground": f"{i}.png", "background": f"{3 - i}.png", "mask": "mask.png", "caption": f"{i}"}
            for i in range(4)
        ],
        "boxes": [{"image": f"{i}.png", "query": f"{i}", "bbox": [2, 2, 20, 20]} for i in range(4)],
        "spans": [
            {"video": "a.mp4", "query": f"{i}", "duration": 2, "spans": [[0.5, 1.5]]} for i in range(4)
        ],
        "routes": [{"images": [f"{i}.png"], "steps": STEPS} for i in range(4)],
        "changed": [{"original": f"{i}.png", "changed": f"{3 - i}.png"} for i in range(4)],
        "pairs": [
            {"prompt": row["question"], "image": row["image"], "chosen": "2", "rejected": "a b"}
            for row in asked
        ],
        "images": [{"prompt": f"{i}", "chosen": f"{i}.png", "rejected": f"{3 - i}.png"} for i in range(4)],
        "pool": [
            {"prompt": f"{i}", "images": ["0.png", "1.png", "2.png"], "scores": [0, 1, 2]} for i in range(4)
        ],
    }
    for name, listed in rows.items():
        write_rows(home / f"{name}.jsonl", listed)
    build_models(home)
    return home


def build_models(home: Path) -> None:
    """Build the models of all runs, by the builders of the library where it has one."""
    (home / "prompts.txt").write_text("0\n1\n2\n3\n")
    texts = {"texts": str(home / "prompts.txt"), "side": 16, "width": 32, "layers": 1, "text_width": 16}
    pieces = {
        "vlm": {
            "name": "vision.tiny_qwen2_5_vl",
            "tokens": WRITTEN,
            "vocab_size": 400,
            "max_pixels": 784,
            **SMALL,
        },
        "emu3": {"name": "vision.tiny_emu3", "codes": 16, "vocab_size": 300, **SMALL},
        "flow": {"name": "diffusion.tiny_flow_model", **texts},
        "layered": {
            **texts,
            "name": "diffusion.tiny_layered_flow_model",
            "texts": str(home / "layers.jsonl"),
            "autoencoder_steps": 1,
        },
    }
    for name, piece in pieces.items():
        Pieces(Stream()).make("builder", as_piece(piece, "")).build(home / name)
    tiny_clip.write_folder(home / "clip")
    write_bert(home / "bert")


@pytest.fixture(scope="module")
def server():
    """Serve a judge that decides by the letters of what it is asked, and a runner of unit tests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply(asked)).encode())

        def log_message(self, *words):
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


def reply(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer a request by its form."""
    if "messages" not in asked:
        return {"passed": [[len(run["code"]) % 2 == 0] * len(run["tests"]) for run in asked["runs"]]}
    content = asked["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    if "<scores>" in text:
        said = f"<scores>{1 + len(text) % 7} {1 + sum(map(ord, text)) % 7}</scores>"
    elif "<checklist>" in text:
        said = '<checklist>{"1": null, "2": null}</checklist>'
    else:
        said = scripted(text)
    return {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}


def rows(home: Path, name: str, data: str = "vision.visual_qa", **options: Any) -> dict[str, Any]:
    return {"data": {"name": data, "path": str(home / f"{name}.jsonl"), **options}}


def options(item: Any) -> dict[str, Any]:
    """Write a piece as a mapping of its name and options."""
    return item if isinstance(item, dict) else {"name": item}


def playing(name: str, **options: Any) -> dict[str, Any]:
    return {"name": "play", "game": {"name": f"vision.{name}", **options}}


def situation(variant: dict[str, Any], home: Path) -> dict[str, Any]:
    """Choose data, and engines after `vision.generate`, by what the pieces of a method read."""
    text = json.dumps(variant)
    needs = [find("advantage", as_piece(item, "").name).needs for item in variant["advantage"]]
    pairs = rows(home, "changed", "vision.image_pairs")
    payoff = {"rewards": [{"name": "precomputed", "key": "payoff", "label": "payoff", "at": "every"}]}
    talks = {"name": "vision.with_environments", "max_turns": 3, "max_completion_length": 18}
    talks |= {"environment": {"name": "vision.grid_world", "label": "won"}, "turn_outcomes": True}
    if "gui" in text:
        videos = rows(home, "spans", "vision.grounding", root=str(home), max_frames=4)["data"]
        listed = [videos, rows(home, "boxes", "vision.boxes")["data"], rows(home, "questions")["data"]]
        return {"data": {"name": "mixture", "sources": ["video", "gui", "maths"], "data": listed}}
    if "temporal_iou" in text or "consensus_span" in text:
        return rows(home, "spans", "vision.grounding", root=str(home), max_frames=4)
    if "clue" in text:
        return pairs | {"after": [playing("spy", civilians=2, rounds=1)]}
    if "payoff" in text:
        return pairs | {"after": [playing("negotiation", rounds=2)]}
    if '"role"' in text and "per_episode" in text and "delegated" not in text:
        return pairs | payoff | {"after": [playing("negotiation", rounds=2)]}
    if any(name in text for name in ("delegated_reward", "hae", "sibling_shape")):
        roles = ["vision.by_role"] * ("delegated" in text)
        return rows(home, "questions") | {"after": [*roles, playing("delegation", decide="hae" in text)]}
    for name, wanted in {"click_reward": "actions", "function_calls": "called"}.items():
        if name in text:
            return rows(home, wanted)
    if "click_inside" in text:
        return rows(home, "boxes", "vision.boxes")
    if "route_reward" in text:
        return rows(home, "routes", "vision.stepwise")
    if '"offline"' in text:
        return rows(home, "pairs", "vision.preference_pairs") | {
            "rewards": [{"name": "precomputed", "key": "preferred"}]
        }
    if any(need.turns for need in needs) or '"every"' in text or "good_steps" in text:
        scored = {"score_target": True} if "answer_likelihood" in text else {}
        return rows(home, "questions") | {"after": [talks | scored]}
    return rows(home, "questions", demo="2")


@per_outcome
def even(prompt: Prompt, outcome: Outcome) -> float:
    """Call about half of all answers right; a tiny model gives none of the right ones."""
    return float(sum(map(ord, outcome.text or "")) % 2 == 0)


HALF_RIGHT = {"name": f"{__name__}:even", "label": "exact_match"}


def of_texts(variant: dict[str, Any], home: Path) -> dict[str, Any]:
    """Lay a method of texts over a run of the tiny model."""
    generate = {"name": "vision.generate", "max_completion_length": 6, "stop_strings": ["</tool_call>"]}
    chosen = situation(variant, home)
    engine = variant.setdefault("rollout", {}).setdefault(
        "engine", ["vision.generate", *chosen.pop("after", [])]
    )
    for number, item in enumerate(engine):
        if as_piece(item, "").name == "vision.generate":
            length = options(item).get("max_completion_length")
            engine[number] = {**options(item), **generate}
            if isinstance(length, dict):  # a schedule
                engine[number]["max_completion_length"] = {**length, "low": 4, "high": 6}
    named = [of for item in variant["advantage"] if isinstance(of := options(item).get("of"), str)]
    rewards = [HALF_RIGHT, *({"name": "lexical_variety", "label": name} for name in named)]
    rewards = list({reward["label"]: reward for reward in reversed(rewards)}.values())[::-1]
    if "rewards" in variant:
        variant["rewards"] = [HALF_RIGHT if item == "exact_match" else item for item in variant["rewards"]]
    roles = {"with_hinter": ["reasoner", "hinter"], "delegated_reward": ["main", "sub"]}
    adapters = next((names for name, names in roles.items() if name in json.dumps(variant)), [])
    policy = {"name": "vision.tokens", "model": str(home / "vlm"), "dtype": "float32"}
    if reads_scores(variant):
        policy["name"] = "vision.reward_model"
    if "with_branches" in json.dumps(variant):
        engine[1] |= {"branching": [4] if len(engine[1]["branching"]) == 1 else [2, 2], "segment_length": 2}
    if "allocate" in json.dumps(variant):
        variant["sampler"][1] |= {"at_least": 2, "at_most": 3}
    for item in variant["advantage"]:
        if "size" in options(item):
            item["size"] = 2
    if adapters:
        policy |= {"roles": adapters, "lora_rank": 2}
    if "bidirectional" in json.dumps(variant):
        policy |= {"transform": [{"name": "vision.steering", "layer": 0}]}
    return {"policy": policy, "rewards": rewards, **chosen}


def of_images(variant: dict[str, Any], home: Path) -> dict[str, Any]:
    """Lay a method of flow models over a run of the tiny one."""
    policy = {"name": "diffusion.flow", "model": str(home / "flow"), "dtype": "float32"}
    engine = variant["rollout"]["engine"]
    if "segments" in variant["policy"]["likelihood"]:
        variant["policy"]["likelihood"]["segments"] = 1  # an image has one
    if as_piece(engine[0], "").name == "offline":
        many = variant["rollout"]["num_generations"] > 2
        sizes = {"root": str(home), "height": 16, "width": 16}
        data = rows(home, "pool" if many else "images", "diffusion.images", **sizes)
        return {"policy": policy, "rewards": [{"name": "precomputed", "key": "score"}], **data}
    first = options(engine[0])
    engine[0] = {**first, "height": 16, "width": 16}
    if "stochastic" not in json.dumps(first):
        engine[0]["num_inference_steps"] = min(first.get("num_inference_steps", 4), 10)
    elif "window_start" not in first:  # else a schedule of windows over all steps
        engine[0]["num_inference_steps"] = FEW_STEPS
        engine[0]["stochastic"] = [min(step, FEW_STEPS - 1) for step in first["stochastic"]]
    if "with_layers" in json.dumps(engine):
        return {
            "policy": policy | {"model": str(home / "layered")},
            "rewards": [{"name": "precomputed", "key": "mask_iou", "label": "mask_iou"}],
            **rows(home, "layers", "diffusion.layered_images"),
        }
    data = {"data": {"name": "diffusion.prompts", "path": str(home / "prompts.txt")}}
    return {"policy": policy, "rewards": ["diffusion.jpeg_compressibility"], **data}


def of_image_tokens(variant: dict[str, Any], home: Path) -> dict[str, Any]:
    """Lay a method of images as tokens over a run of a tiny Emu3."""
    sizes = {"height": 8, "width": 8}
    variant["rollout"]["engine"][0] = {"name": "vision.generate_images", "max_text_length": 4, **sizes}
    return {
        "policy": {"name": "vision.tokens", "model": str(home / "emu3"), "dtype": "float32"},
        "data": {"name": "diffusion.prompts", "path": str(home / "prompts.txt")},
        "rewards": ["diffusion.jpeg_compressibility"],
    }


def laid(path: Path, home: Path, server: str, output: Path) -> Config:
    """Lay a method over the smallest run that has what it reads."""
    text = json.dumps(read(path)).replace("http://localhost:8000", server)
    variant = json.loads(text.replace("Qwen/Qwen2.5-VL-7B-Instruct", str(home / "vlm")))
    likelihood = "likelihood" in variant.get("policy", {})
    of_texts_or_tokens = of_image_tokens if "generate_images" in text else of_texts
    plan = (of_images if likelihood else of_texts_or_tokens)(variant, home)
    for name, model in {"route_reward": "bert", "clip_hardness": "clip"}.items():
        for number, item in enumerate(variant.get("rewards", [])):
            if as_piece(item, "").name == name:
                variant["rewards"][number] = {"model": str(home / model), **options(item)}
    usual = {
        "learn": {"learning_rate": 1e-3},
        "report": {"trackers": [], "log_completions": False, "startup_checks": []},
        "output_dir": str(output),
    }
    group = min(
        variant.get("rollout", {}).get("num_generations", 2),
        2 if likelihood or "turn_outcomes" in str(variant) or "'play'" in str(variant) else 4,
    )
    parts = variant.get("learn", {}).get("minibatches", 1)
    small = {
        "max_steps": 2,
        "save_steps": 100,
        "rollout": {"num_prompts": max(2, parts), "num_generations": group},
    }
    return parse(merge(merge(merge(usual, plan), variant), small), Config)


@pytest.fixture(scope="module")
def one_processor() -> Iterator[None]:
    """Load the processor of each model once for all runs, which change none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_processor", cache(loading.load_processor))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_method_takes_two_steps(path, home, server, tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.reporting.html.write_page", lambda folder, *rest: folder)
    run = build(laid(path, home, server, tmp_path / "run"), quiet=True)
    train(run)
    steps = run.journal.read()
    assert len(steps) == 2
    # A step whose answers all earn the same may have nothing to learn from.
    learned = [step[name] for step in steps for name in ("loss", "grad_norm") if name in step]
    assert learned or read(path).get("learn", {}).get("num_iterations") == 0
    assert all(map(math.isfinite, learned))
    # Conversations and games have more than one turn.
    turns = [step[name] for step in steps for name in ("tools/turns", "game/turns") if name in step]
    assert not turns or max(turns) > 1
