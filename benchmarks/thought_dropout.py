"""Thought dropout (TON, arXiv 2505.16854) on easy-VQA: share of empty thoughts, tokens and accuracy.

    python -m benchmarks.thought_dropout [--quick]

A small LLaVA first learns to see: it is trained on answers and, apart from them, on captions, once for all.
Then it is tuned on demonstrations and trained by GRPO on right answers and format, in three arms: answers
alone; a thought before every answer; and thoughts of which half were dropped in the demonstrations (TON).
easy-VQA has no thoughts, so they are derived by rule: what the image shows, such as "a blue circle", which
the questions about an image reveal together. Held-out questions are answered greedily after both phases,
which are runs of mmrl and go on where they were killed; what is measured already is not measured again.
`--quick` trains and measures a few steps of one seed, to see that all of it works.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from mmrl.build import build, load_evaluator
from mmrl.cli import main as mmrl
from mmrl.config.loading import merge
from mmrl.config.schema import Config, EvaluateConfig, load
from mmrl.data.dataset_io import Rows, write_rows
from mmrl.training.loop import train

RESULTS = Path(__file__).parent / "results" / "thought_dropout.json"
EXAMPLES = Path(__file__).parents[1] / "examples" / "visual_qa"
THOUGHT, ANSWER = "<think>{thought}</think><answer>{answer}</answer>", "<answer>{answer}</answer>"
ARMS = {  # form of the demonstrations, the blocks of the format, share of the thoughts that are dropped
    "answers alone": (ANSWER, "answer", None),
    "always a thought": (THOUGHT, "think,answer", None),
    "half dropped (TON)": (THOUGHT, "think,answer", 0.5),
}
SIZES = {"side": 32, "patch": 8, "width": 64, "layers": 2, "vision_width": 64, "vision_layers": 2}
SEEN = 3000  # questions beside the captions
LONGEST = 32  # tokens of an answer
REPORT = {"trackers": [], "log_completions": False, "media_log_steps": 0, "startup_checks": []}
WORDS = {  # train the tokenizer: the demonstration's marks are a few tokens
    "user what color is the shape? assistant <think>a black circle</think><answer>black</answer>",
    "user does the image not contain a green circle? assistant <think>a brown triangle</think><answer>yes",
    "user is there a red triangle in the image? assistant <think>a gray rectangle</think><answer>no</answer>",
    "user what is the blue shape? assistant <think>\n\n</think><answer>triangle</answer>",
    "user which color is a teal shape present? assistant <think>a teal circle</think><answer>teal</answer>",
    "user is there not a yellow shape? assistant <think>\n\n</think><answer>rectangle</answer>",
}


def make_rows(folder: Path, source: str) -> None:
    """Write easy-VQA's questions about the images whose shape and colour are known, with a thought each."""
    if (folder / "seen.jsonl").exists():
        return
    more = [f"build.source={source}"] if source else []
    if mmrl(["build", str(EXAMPLES / "build_easy_vqa.yaml"), f"output={folder}", *more]):
        raise SystemExit(1)
    for split in ("train", "test"):
        scenes = Rows(folder / f"{split}_scenes.jsonl", folder)
        thoughts = {row.columns["image"]: row.columns["captions"][0] for row in scenes}
        asked = (row.columns for row in Rows(folder / f"{split}.jsonl", folder))
        known = [{**row, "thought": thoughts[row["image"]]} for row in asked if row["image"] in thoughts]
        write_rows(folder / f"thoughts_{split}.jsonl", known)
    asked = [row.columns for row in Rows(folder / "thoughts_train.jsonl", folder)][:SEEN]
    captions = [row.columns for row in Rows(folder / "train_scenes.jsonl", folder)]
    seen = [{**row, "shown": f"<answer>{row['answer']}</answer>"} for row in asked]
    for row in captions:
        caption = row["captions"][0]
        told = {"question": "what do you see?", "answer": caption, "shown": f"<think>{caption}</think>"}
        seen.append({"image": row["image"], **told})
    write_rows(folder / "seen.jsonl", seen)


def make_model(folder: Path) -> Path:
    """Write the model that all arms begin from."""
    if not (folder / "config.json").exists():
        sizes = {**SIZES, "texts": sorted(WORDS)}
        path = folder.parent / "model.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"build": {"name": "vision.tiny_llava", **sizes}, "output": str(folder)}))
        if mmrl(["build", str(path)]):
            raise SystemExit(1)
    return folder


def common(given: argparse.Namespace, model: Path, arm: str, seed: int) -> dict[str, Any]:
    """Say what all runs of an arm share."""
    form, tags, share = ARMS[arm]
    path = str(given.rows / "thoughts_train.jsonl")
    rows = {"name": "vision.visual_qa", "path": path, "demo": form, "limit": given.rows_limit}
    return {
        "policy": policy(model),
        "data": rows if share is None else {"name": "drop_thoughts", "data": rows, "share": share},
        "rewards": [
            {"name": "exact_match"},
            {"name": "tag_format", "tags": tags},
            {"name": "skip_ratio", "weight": 0.0},
        ],
        "report": REPORT,
        "save_steps": 100,
        "seed": seed,
    }


def policy(model: Path) -> dict[str, Any]:
    """Name a model of which everything is trained."""
    return {"name": "vision.tokens", "model": str(model), "dtype": "float32", "freeze_vision_tower": False}


def imitation(steps: int, rate: float) -> dict[str, Any]:
    """Say how demonstrations are learned: 64 a step, at a rate that falls to a twentieth."""
    falling = {"name": "linear", "start": rate, "end": rate / 20, "steps": steps}
    return {
        "include": ["methods/grpo/supervised.yaml"],
        "rollout": {"num_prompts": 64},
        "learn": {"learning_rate": falling, "optimizer": "muon", "micro_batch_steps": 65536},
        "max_steps": steps,
    }


def seeing(given: argparse.Namespace) -> Path:
    """Train the model that all arms begin from on answers and captions; return its folder."""
    raw = {
        "policy": policy(make_model(given.output / "model")),
        "data": {"name": "vision.visual_qa", "path": str(given.rows / "seen.jsonl"), "demo": "{shown}"},
        "rewards": ["exact_match"],
        "advantage": [{"name": "pick", "of": "exact_match"}],
        "report": REPORT,
        "save_steps": 100,
    }
    return trained(merge(imitation(given.see_steps, 5e-3), raw), given.output / "seeing")


def tuned(given: argparse.Namespace, model: Path, arm: str, seed: int, folder: Path) -> Path:
    """Tune on the demonstrations of an arm; return the model's folder."""
    return trained(merge(common(given, model, arm, seed), imitation(given.sft_steps, 2e-3)), folder)


def reinforced(given: argparse.Namespace, model: Path, arm: str, seed: int, folder: Path) -> Path:
    """Train by GRPO, as TON does; return the model's folder."""
    engine = {"name": "vision.generate", "max_completion_length": LONGEST, "temperature": 1.0}
    changes = {
        "include": ["methods/grpo/ton.yaml"],
        "rollout": {"engine": [engine], "num_prompts": 16, "num_generations": 8},
        "learn": {"learning_rate": given.grpo_rate, "micro_batch_steps": 65536},
        "max_steps": given.grpo_steps,
    }
    return trained(merge(common(given, model, arm, seed), changes), folder)


def trained(raw: Mapping[str, Any], folder: Path) -> Path:
    """Train a run to its end, from where it was killed; return the folder of its last model."""
    model = folder / f"checkpoint-{raw['max_steps']}" / "model"
    if not model.exists():
        train(build(load({**raw, "output_dir": str(folder)}, kind=Config), quiet=True))
    return model


def measured(given: argparse.Namespace, model: Path, arm: str, place: Path) -> dict[str, float]:
    """Answer held-out questions greedily; return accuracy, well-formed and empty shares, and tokens."""
    if place.exists():
        return json.loads(place.read_text())
    raw = common(given, model, arm, 0)
    evaluation = {
        "data": {"name": "vision.visual_qa", "path": str(given.rows / "thoughts_test.jsonl")},
        "engine": [
            {
                "name": "vision.generate",
                "max_completion_length": LONGEST,
                "temperature": 0.0,
                "batch_size": 64,
            }
        ],
        "rewards": raw["rewards"],
        "num_prompts": given.prompts,
    }
    config = {"policy": raw["policy"], "evaluation": evaluation, "output_dir": str(place.parent)}
    found = load_evaluator(load(config, kind=EvaluateConfig)).measure()
    names = {"accuracy": "exact_match", "well formed": "tag_format", "empty thoughts": "skip_ratio"}
    numbers = {name: found.metrics[reward] for name, reward in names.items()}
    numbers["tokens"] = float(found.table.length.double().mean())
    place.write_text(json.dumps(numbers) + "\n")
    return numbers


def one_arm(given: argparse.Namespace, arm: str, seed: int) -> dict[str, dict[str, float]]:
    """Train and measure both phases of an arm."""
    home = given.output / f"{arm.split(maxsplit=1)[0]}-{seed}"
    home.mkdir(parents=True, exist_ok=True)
    first = tuned(given, seeing(given), arm, seed, home / "tuned")
    second = reinforced(given, first, arm, seed, home / "grpo")
    return {
        "tuned": measured(given, first, arm, home / "tuned.json"),
        "grpo": measured(given, second, arm, home / "grpo.json"),
    }


def summary(runs: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    """Average over seeds, with standard deviations, and say what dropped thoughts save of the tokens."""
    table: dict[str, Any] = {}
    for arm, seeds in runs.items():
        for phase in ("tuned", "grpo"):
            for name in seeds[0][phase]:
                values = [run[phase][name] for run in seeds]
                spread = stdev(values) if len(values) > 1 else 0.0
                table.setdefault(arm, {}).setdefault(phase, {})[name] = [mean(values), spread]
    whole, dropped = (table[arm]["grpo"] for arm in ("always a thought", "half dropped (TON)"))
    saved = 1 - dropped["tokens"][0] / whole["tokens"][0]
    gain = dropped["accuracy"][0] - whole["accuracy"][0]
    return {"arms": table, "tokens saved by dropping": saved, "accuracy gained by dropping": gain}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and write and print what was measured."""
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/thought_dropout"))
    parser.add_argument("--source", default="", help="the data folder of easy-vqa, if it is not installed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--see-steps", type=int, default=800)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--grpo-steps", type=int, default=40)
    parser.add_argument("--grpo-rate", type=float, default=5e-5)
    parser.add_argument("--prompts", type=int, default=300, help="held-out questions")
    parser.add_argument("--rows-limit", type=int, default=2000, help="questions to train on; 0: all")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; writes no results")
    given = parser.parse_args(arguments)
    if given.quick:
        given.seeds, given.see_steps, given.sft_steps, given.grpo_steps, given.prompts = 1, 2, 2, 1, 8
        given.rows_limit = 200
        given.output = given.output.with_name(f"{given.output.name}_quick")
    given.rows = given.output / "rows"
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    make_rows(given.rows, given.source)
    runs: dict[str, list] = {arm: [] for arm in ARMS}
    for seed in range(given.seeds):
        for arm in ARMS:
            runs[arm].append(one_arm(given, arm, seed))
            print(json.dumps({"seed": seed, "arm": arm, **runs[arm][-1]}), flush=True)
    settings = {
        name: getattr(given, name) for name in ("seeds", "sft_steps", "grpo_steps", "grpo_rate", "prompts")
    }
    found = {**settings, **summary(runs), "runs": runs}
    print(json.dumps(summary(runs), indent=1))
    if not given.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
