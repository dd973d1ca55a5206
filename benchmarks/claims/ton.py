"""TON against GRPO with a thought every time, where thoughts are long and only some questions need them.

    python -m benchmarks.claims.ton [--seeds 0 1 2] [--quick]

The situation and the rule of the verdict are in docs/claims.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from PIL import Image

from benchmarks.claims.common import (
    PILOT,
    REPORT,
    Claim,
    answered,
    built,
    imitation,
    leave,
    once,
    options,
    policy,
    row,
    trained,
    value,
)
from mmrl.config.loading import merge
from mmrl.data.dataset_io import write_rows

CLAIM = Claim(
    method="TON",
    baseline="GRPO, always a thought",
    claim="answers get much shorter than those of GRPO with a thought every time, and no less right",
    situation="thoughts of 16 tokens, needed by one question of three",
    measure="tokens",
)
NUMBERS = {"red": 1, "green": 2, "blue": 3, "black": 0}
PAINT = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 60, 220), "black": (0, 0, 0)}
CELLS, SIDE, PATCH = 8, 24, 8  # cells of an image of 3 x 3 patches
DEMO = "<think>{thought}</think><answer>{answer}</answer>"
REWARDS = [
    "exact_match",
    {"name": "tag_format", "tags": "think,answer"},
    {"name": "skip_ratio", "weight": 0.0},
]
LONGEST = 28  # tokens of an answer
BASE_STEPS, TUNE_STEPS, STEPS, PROMPTS, GENERATIONS = 300, 60, 30, 16, 8
RATE = 1e-4  # of the baseline at seed 100, 60 steps: accuracy 0.804; at 5e-4 0.780; 0.731 before GRPO
ARMS = {CLAIM.baseline: 0.0, "TON": 0.5}  # share of the thoughts that are dropped
WHY = ": GRPO takes all thoughts back, as answers without one are less often right at its start"


def make_rows(folder: Path, name: str, images: int) -> Path:
    """Draw images and write `NAME.jsonl`: of an image two colours of cells and the sum are asked."""
    path, chance = folder / f"{name}.jsonl", random.Random(name)
    if path.exists():
        return path
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(images):
        cells = [chance.choice(list(NUMBERS)) for _ in range(CELLS)]
        image = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
        for place, cell in enumerate(cells):
            image.paste(PAINT[cell], (place % 3 * PATCH, place // 3 * PATCH, *corner(place)))
        file = f"images/{name}_{number:05d}.png"
        image.save(folder / file)
        sums = list(accumulate(NUMBERS[cell] for cell in cells))
        thought = "".join(f"{cell}{total % 10}" for cell, total in zip(cells, sums, strict=True))
        asked = {f"color{i}": (f"color of cell {i + 1}?", cells[i]) for i in chance.sample(range(CELLS), 2)}
        asked["sum"] = ("last digit of the sum?", str(sums[-1] % 10))
        for kind, (question, answer) in asked.items():
            about = {"id": f"{name}_{number:05d}#{kind}", "image": file, "thought": thought}
            rows.append({**about, "question": question, "answer": answer})
    chance.shuffle(rows)
    write_rows(path, rows)
    return path


def corner(place: int) -> tuple[int, int]:
    """Return the lower right corner of a cell, in pixels."""
    return (place % 3 + 1) * PATCH, (place // 3 + 1) * PATCH


def make_model(folder: Path) -> Path:
    """Build the small LLaVA of all runs."""
    build = {
        "name": "vision.tiny_llava", "side": SIDE, "patch": PATCH, "width": 64, "layers": 2,
        "vision_width": 64, "vision_layers": 1, "init": 0.08,
        "texts": ["user color of cell 1? assistant", "user last digit of the sum? assistant"],
        "tokens": [*NUMBERS, "<think>", "</think>", "<answer>", "</answer>"],
    }  # fmt: skip
    return built(build, folder)


def shared(given: argparse.Namespace, model: Path, share: float, seed: int) -> dict[str, Any]:
    """Settings of both phases of an arm; `share` of the demonstrations have an empty thought."""
    path = make_rows(given.runs / "rows", "train", 20 if given.quick else 4000)
    rows = {"name": "vision.visual_qa", "path": str(path), "demo": DEMO}
    return {
        "policy": policy(model),
        "data": {"name": "drop_thoughts", "data": rows, "share": share},
        "rewards": REWARDS,
        "report": REPORT,
        "seed": seed,
    }


def tuned(given: argparse.Namespace, arm: str) -> Path:
    """Imitate all thoughts, then the demonstrations of an arm, once for all seeds."""
    base, steps = (2, 2) if given.quick else (BASE_STEPS, TUNE_STEPS)
    raw = shared(given, make_model(given.runs / "model"), 0.0, PILOT)
    model = trained(merge(raw, imitation(base, 3e-3)), given.runs / "base")
    raw = shared(given, model, ARMS[arm], PILOT)
    return trained(merge(raw, imitation(steps, 3e-3)), given.runs / f"tuned-{ARMS[arm]}")


def reinforced(given: argparse.Namespace, arm: str, seed: int) -> Path:
    """Go on with GRPO as TON does; return the model's folder."""
    engine = {"name": "vision.generate", "max_completion_length": LONGEST, "temperature": 1.0}
    changes = {
        "include": ["methods/grpo/ton.yaml"],
        "rollout": {"engine": [engine], "num_prompts": PROMPTS, "num_generations": GENERATIONS},
        "learn": {"learning_rate": given.rate, "micro_batch_steps": 65536},
        "data": {"data": {"limit": PROMPTS * STEPS}},  # one pass
        "max_steps": 2 if given.quick else STEPS,
    }
    raw = merge(shared(given, tuned(given, arm), ARMS[arm], seed), changes)
    return trained(raw, given.runs / f"grpo-{ARMS[arm]}-{seed}")


def run(given: argparse.Namespace, arm: str, phase: str, seed: int) -> dict[str, Any]:
    """Train an arm up to a phase; return what is measured of its held-out answers."""
    model = tuned(given, arm) if phase == "tuned" else reinforced(given, arm, seed)
    test = make_rows(given.runs / "rows", "test", 4 if given.quick else 100)
    rows = {"name": "vision.visual_qa", "path": str(test), "demo": DEMO}
    found = answered(model, rows, REWARDS, LONGEST, given.runs / f"answers-{phase}-{ARMS[arm]}-{seed}")
    measures = {"tokens": found["tokens"], "accuracy": found["exact_match"]}
    for kind in ("color", "sum"):
        for name, of in (("accuracy", "exact_match"), ("empty thoughts", "skip_ratio")):
            part = {uid: x for uid, x in found[of].items() if uid.partition("#")[2].startswith(kind)}
            measures[f"{name}, {kind}"] = part
    return {"seed": seed, "answers": measures}


def verdict_of(tokens: Sequence[float], accuracy: Sequence[float], baseline: float) -> str:
    """Apply the rule of docs/claims.md to the gains of tokens and accuracy, given the baseline's tokens."""
    shorter, right = tokens[2] < -0.2 * baseline, accuracy[1] > -0.05
    return "appears" if shorter and right else "does not appear"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not there yet, and write the result."""
    given = options("ton", __doc__, arguments)
    given.rate = RATE
    runs = {
        (arm, phase): [
            once(given.runs / f"{phase}-{ARMS[arm]}-{seed}.json", partial(run, given, arm, phase, seed))
            for seed in given.seeds
        ]
        for phase in ("tuned", "grpo")
        for arm in ARMS
    }
    base = runs[CLAIM.baseline, "grpo"]
    rows = [
        row(arm if phase == "grpo" else f"{arm}, before GRPO", some, base, measure)
        for measure in base[0]["answers"]
        for (arm, phase), some in runs.items()
        if phase == "grpo" or measure == "tokens" or (measure.startswith("empty") and arm == "TON")
    ]
    gains = {one["measure"]: one["gain"] for one in rows if one["name"] == "TON"}
    tokens = mean(value(one, "tokens") for one in base)
    start = mean(value(one, "tokens") for one in runs["TON", "tuned"])
    verdict = verdict_of(gains["tokens"], gains["accuracy"], tokens) + WHY
    leave(given, CLAIM, start, rows, verdict, [one for some in runs.values() for one in some])
    return 0


if __name__ == "__main__":
    sys.exit(main())
