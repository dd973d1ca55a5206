"""What cheaper ways to run trained models do to answers: grounding in videos, and questions about images.

    python -m benchmarks.pruned_quality grounding --vlm FOLDER --sources FOLDER
    python -m benchmarks.pruned_quality questions

`--vlm` is a model that `make demo` trained (or the one that it started from), `--sources` where its sample
videos lie; the model of `questions` is trained first. Then the model is trained on, for as many steps each,
whole and through `yopo25` and `yopo12`, and all are measured on the same held-out prompts. Training on is by
imitation, as in the paper, and with `--grpo-steps` by GRPO after that. Every step is an ordinary `mmrl`
command; what is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.cli import main as mmrl
from mmrl.config.loading import read
from mmrl.vision.models import processor

RESULTS = Path(__file__).parent / "results"
ROOM = 8 << 30  # 41,000 encoded prompts of 150 kB: decoding videos anew would take most of the time
PRUNED: dict[str, list[Any]] = {"yopo25": ["compression.yopo25"], "yopo12": ["compression.yopo12"]}
# An eighth as well, in a model of four layers, but shared out otherwise: the authors' loader knows masks of
# half of the heads and more, and with those it takes an eighth of the ffn_units.
SHARED: dict[str, list[Any]] = {
    "half of heads, eighth of ffn_units": [
        "compression.local_visual_attention",
        {"name": "compression.drop_visual_heads", "keep": 0.5},
        {"name": "compression.sparse_visual_ffn", "keep": 0.125},
        {"name": "compression.drop_visual_layers", "after": 2},
    ]
}
GROUPS = "1 bit, groups of 4"
BITS = {
    "1 bit": {"nbits": 1},
    GROUPS: {"nbits": 1, "q_group_size": 4},
    "keys 2 bits, values 1": {"nbits": 2, "value_nbits": 1},
    "2 bits": {"nbits": 2},
}
CODEBOOK = "1 bit, a codebook"
TARGETS = {  # what may be lost
    "1 bit": 0.01, GROUPS: 0.01, CODEBOOK: 0.01, "yopo25": 0.01, "yopo12": 0.03,
    **dict.fromkeys(SHARED, 0.03),
}  # fmt: skip


def run(*command: str) -> None:
    """Run a command of mmrl."""
    print("mmrl", *command, flush=True)
    code = mmrl(command)
    if code:
        raise SystemExit(code)


def once(made: Path, *command: str) -> Path:
    """Run a command, unless what it makes is there."""
    if not made.exists():
        run(*command)
        if not made.exists():  # a run that was asked to stop ends with exit code 0 as well
            raise SystemExit(f"stopped before '{made}' was there; the same command goes on")
    return made


def cuts(name: str) -> list[Any]:
    """List the transforms that a model is trained and run through."""
    return {**PRUNED, **SHARED}.get(name, [])


def train_on(
    folder: Path, config: str, models: Mapping[str, Path], steps: int, overrides: Sequence[str]
) -> dict[str, Path]:
    """Train models on, each through the transform of its name, all in the same way."""
    made = {}
    for name, model in models.items():
        transform = json.dumps(cuts(name))
        made[name] = once(
            folder / name / f"checkpoint-{steps}" / "model",
            *("train", config, f"policy.model={model}", f"max_steps={steps}", f"output_dir={folder / name}"),
            *("evaluation.num_prompts=200", f"policy.transform={transform}", *overrides),
        )
    return made


def cache(options: Mapping[str, Any], name: str = "visual_quant") -> dict[str, Any]:
    """Make a setting of an engine's cache."""
    return {"evaluation.engine.0.cache": {"name": f"compression.{name}", **options}}


def settings(
    start: Path, trained: Mapping[str, Path], more: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """List what is measured. Differences are to the first: the whole model, trained on like the others."""

    def pruned(name: str, model: Path) -> dict[str, Any]:
        return {"policy.model": str(model), "policy.transform": cuts(name)}

    found: dict[str, Mapping[str, Any]] = {"full": {}}
    found |= {name: cache(options) for name, options in BITS.items()} | more
    found |= {name: pruned(name, model) for name, model in trained.items() if name != "full"}
    found |= {f"yopo25, {name}": found["yopo25"] | cache(BITS[name]) for name in ("1 bit", GROUPS)}
    found |= {f"{name} without training": pruned(name, trained["full"]) for name in PRUNED}
    return found | {"before": {"policy.model": str(start)}}


def compare(
    output: Path,
    config: str,
    start: Path,
    trained: Mapping[str, Path],
    data: Sequence[str],
    prompts: int,
    **more: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure all settings side by side."""
    here = [f"policy.model={trained['full']}", f"output_dir={output / 'settings'}"]
    raw = read(config, [*data, *here, f"evaluation.num_prompts={prompts}"])
    raw |= {
        "settings": settings(start, trained, more),
        "cost_metrics": ["operations", "vision.keys_and_values"],
    }
    path = output / "settings.json"
    path.write_text(json.dumps(raw, indent=1))
    made = once(output / "settings" / "evaluation.html", "evaluate", str(path))
    return json.loads(made.with_name("evaluation.json").read_text())


def grounding(given: argparse.Namespace) -> dict[str, Any]:
    """Train on, by imitation and perhaps by GRPO, with the settings of `make demo`, and measure mIoU."""
    output, videos = given.output / "grounding", given.output / "videos"
    made = "build", "examples/video_grounding/videos.yaml", f"build.sources={given.sources}"
    many = f"build.num_train={given.num_train}", f"build.num_test={given.num_test}"
    once(videos / "test.jsonl", *made, *many, f"output={videos}")
    # What a model knows by heart says little about which errors matter: a codebook takes videos spliced anew.
    other, few = given.output / "other_clips", ("build.num_train=120", "build.num_test=1", "seed=1")
    once(other / "train.jsonl", *made, *few, f"output={other}")
    held_out = [f"evaluation.data.path={videos}/test.jsonl", f"evaluation.data.root={videos}"]
    data = [f"data.path={videos}/train.jsonl", f"data.root={videos}", f"seed={given.seed}", *held_out]
    start, steps = Path(given.vlm), given.grpo_steps
    models = dict.fromkeys(("full", *PRUNED, *SHARED), start)
    rate = f"{{name: linear, start: 2e-3, end: {given.end_rate}, steps: {given.steps}}}"
    here = [*data, f"learn.learning_rate={rate}"]
    models = train_on(output / "sft", "examples/video_grounding/cold_start.yaml", models, given.steps, here)
    if steps:
        here = [*data, f"learn.learning_rate.steps={steps}"]
        models = train_on(output / "grpo", "examples/video_grounding/grpo.yaml", models, steps, here)
    codebook = once(
        output / "codebook" / "codebook.safetensors", "build", "examples/video_grounding/codebook.yaml",
        f"output={output / 'codebook'}",
        f"build.model.model={models['full']}", f"build.prompts.path={other}/train.jsonl",
        f"build.prompts.root={other}",
    )  # fmt: skip
    more = {CODEBOOK: cache({"of": "visual", "first": 0, "codebook": str(codebook)}, "binary_codebook")}
    return compare(
        output, "examples/video_grounding/pareto.yaml", start, models, held_out, given.prompts, **more
    )


def questions(given: argparse.Namespace) -> dict[str, Any]:
    """Train a small model on easy-VQA, then on, supervised, as the paper does, and measure accuracy."""
    output, asked = given.output / "questions", given.output / "easy_vqa"
    once(asked / "test.jsonl", "build", "examples/visual_qa/build_easy_vqa.yaml", f"output={asked}")
    held_out = [f"evaluation.data.path={asked}/test.jsonl", f"evaluation.data.root={asked}"]
    data = [f"data.path={asked}/train.jsonl", f"data.root={asked}", *held_out]
    model = once(output / "model", "build", "examples/visual_qa/model.yaml", f"output={output / 'model'}")
    start = once(
        output / "train" / "checkpoint-440" / "model", "train", "examples/visual_qa/train.yaml",
        f"policy.model={model}", f"output_dir={output / 'train'}", "evaluation.num_prompts=200", *data,
    )  # fmt: skip
    models = dict.fromkeys(("full", *PRUNED), start)
    rate = f"learn.learning_rate={{name: linear, start: 2e-3, end: 1e-4, steps: {given.steps}}}"
    for number in range(given.rounds):
        folder = output / f"imitation{number or ''}"
        models = train_on(folder, "examples/visual_qa/train.yaml", models, given.steps, [*data, rate])
    return compare(output, "examples/visual_qa/evaluate.yaml", start, models, held_out, given.prompts)


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where models lie."""
    settings = {
        name: {key: value for key, value in one.items() if key != "changes"}
        for name, one in found["settings"].items()
    }
    return {**found, "settings": settings}


def main() -> None:
    """Measure one of the two, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("grounding", "questions"))
    parser.add_argument("--output", type=Path, default=Path("runs/pruned_quality"))
    parser.add_argument("--vlm", default="runs/demo/grpo/checkpoint-150/model")
    parser.add_argument("--sources", default=".venv/clips")
    parser.add_argument(
        "--num-train", type=int, default=10000, help="videos to train on, of about four questions each"
    )
    parser.add_argument("--num-test", type=int, default=500, help="held-out videos")
    parser.add_argument("--prompts", type=int, default=0, help="held-out prompts to measure on; 0: all")
    parser.add_argument("--steps", type=int, help="of imitation (6000; questions: 1400)")
    parser.add_argument("--rounds", type=int, default=1, help="of so many steps (questions)")
    parser.add_argument("--end-rate", default="1e-4", help="of imitation, which begins at 2e-3 (grounding)")
    parser.add_argument("--grpo-steps", type=int, default=0, help="of GRPO after imitation (grounding)")
    parser.add_argument("--seed", type=int, default=0, help="of training on (grounding)")
    parser.add_argument("--record", help="the name in the file of results (default: what is measured)")
    given = parser.parse_args()
    given.steps = given.steps or {"grounding": 6000, "questions": 1400}[given.what]
    torch.set_num_threads(1)
    processor.CACHE_BYTES = ROOM
    mine = {"grounding": grounding, "questions": questions}[given.what](given)
    path = RESULTS / "pruned_quality.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    more = {
        "grounding": {
            "videos": given.num_train,
            "grpo_steps": given.grpo_steps,
            "seed": given.seed,
        },
        "questions": {"rounds": given.rounds},
    }
    name = given.record or given.what
    found[name] = {"imitation_steps": given.steps} | more[given.what] | plain(mine)
    path.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"pruned_quality_{name}.svg").write_text(
        (given.output / given.what / "settings" / "pareto.svg").read_text()
    )
    judge(mine)


def judge(found: Mapping[str, Any]) -> None:
    """Tell what is lost against the whole model, and whether it is what may be."""
    metric = found["target_metric"]
    for name, one in found["settings"].items():
        if name not in TARGETS:
            continue
        most = TARGETS[name]
        gap, (low, high) = one["differences"][metric], one["intervals_of_differences"][metric]
        verdict = "kept" if gap >= -most else "missed"
        print(f"{name}: {metric} {gap:+.4f} ({low:+.4f} to {high:+.4f}), may lose {most}: {verdict}")


if __name__ == "__main__":
    main()
