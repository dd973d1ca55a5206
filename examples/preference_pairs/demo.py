"""Demo of preference pairs without a judge: captions that hallucinate less.

A small LLaVA learns to caption and describes each image twice, a small CLIP ranks the two captions, and DPO
learns from the pairs; hallucination is measured on held-out images. The two baselines learn from the same
captions, paired by the hallucination ratio alone, without CLIP's reversal, and paired at random.

Run `python -m examples.preference_pairs.demo [--textures FOLDER]`. Each step is an ordinary `mmrl` command
with a configuration of this folder; all results are written to `--output`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.demo_arguments import demo_parser
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.rng import Stream

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

RULES = {"clip": "score", "no_reversal": "dial", "random": "random"}  # how `vision.clip_pairs` decides
BUILT = ("objects", "scenes", "judge", "model")
UNSEEN = 1 / 5  # share of captions that are learned once more without their image
ASKED = "Describe this image."
CAPTIONED = 1 / 4  # share of training images with captions; the contents of the others are not used
SHOWN = (
    "precision", "recall", "f1", "CHAIRi", "CHAIRs", "hallucinated objects", "fewer than the start",
    "fewer with clip", "completions/mean_length", "pairs", "reversed",
    "right way round",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser("preference_pairs", __doc__, "runs/demo-pairs", "the three DPO runs")
    parser.add_argument(
        "--textures",
        default=".venv/textures",
        help="folder of background images (default: .venv/textures, where make puts some)",
    )
    options = parser.parse_args(arguments)
    demo(Path(options.textures), Path(options.output), options.seed, options.overrides)
    return 0


def demo(
    textures: Path,
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Prepare, pair, train and compare; write `summary.json` and `report.html`, and return the summary.

    `overrides` change the three runs of DPO, `changes` the steps before them by name.
    """
    began = time.perf_counter()
    changes = changes or {}
    for name in (*BUILT, "captioner", "pairs", *RULES):
        shutil.rmtree(output / name, ignore_errors=True)
    captioner = caption(textures, output, seed, changes)
    counts, trained, drawn = {}, {}, ""
    for name in RULES:
        counts[name] = pair(name, output, captioner.model, seed, changes.get("pairs", ()))
        counts[name]["right way round"] = right_way_round(output, name)
        here = [f"data.path={output / 'pairs' / name}", f"policy.model={captioner.model}", *held_out(output)]
        run = make("examples/preference_pairs/dpo.yaml", output / name, seed, [*overrides, *here])
        trained[name] = train(run)
        drawn += exhibit_pairs(run) if name == "clip" else ""
    return report(output, seed, captioner, trained, counts, drawn, time.perf_counter() - began)


# ---- before DPO


def caption(textures: Path, output: Path, seed: int, changes: Mapping[str, Sequence[str]]) -> Trained:
    """Build images, the CLIP that scores and the model, and train the model to caption."""
    scenes = output / "scenes"
    captioned = scenes / "captioned.jsonl"
    here = {
        "scenes": [f"build.objects={output / 'objects'}", f"build.backgrounds={textures}"],
        "judge": [*(f"build.{split}={captioned}" for split in ("train", "test")), f"build.root={scenes}"],
    }
    for name in BUILT:
        options = [*changes.get(name, ()), *here.get(name, ())]
        build(f"examples/preference_pairs/{name}.yaml", output / name, seed, options)
        if name == "scenes":
            split_training(scenes)
    here = [
        f"policy.model={output / 'model'}",
        f"data.path={scenes / 'lessons.jsonl'}",
        f"data.root={scenes}",
    ]
    options = [*changes.get("captioner", ()), *here, *held_out(output)]
    return train(make("examples/preference_pairs/captioner.yaml", output / "captioner", seed, options))


def held_out(output: Path) -> list[str]:
    """Return the overrides for evaluation on the held-out images."""
    scenes = output / "scenes"
    names = {"path": scenes / "test.jsonl", "ontology": scenes / "ontology.json", "root": scenes}
    return [f"evaluation.data.{key}={value}" for key, value in names.items()]


def split_training(scenes: Path) -> None:
    """Split the training images into captioned ones and unlabelled ones for the pairs."""
    rows = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()]
    count = round(CAPTIONED * len(rows))
    shown = [{"id": row["id"], "image": row["image"], "question": ASKED} for row in rows]
    learned = [{**mine, "answer": row["captions"][0]} for mine, row in zip(shown[:count], rows, strict=False)]
    captioned = [{"id": row["id"], "image": row["image"], "prompt": row["answer"]} for row in learned]
    # A pretrained language model knows captions without images; this one learns them from these rows.
    blind = [
        {"id": f"{row['id']} unseen", "question": row["question"], "answer": row["answer"]}
        for row in learned[:: round(1 / UNSEEN)]
    ]
    # Contents of the unlabelled images, for the measurement alone, under the ids of the pairs.
    truth = [{**row, "id": f"unlabelled.jsonl:{i}"} for i, row in enumerate(rows[count:], 1)]
    for name, some in (
        ("captioned", captioned),
        ("lessons", [*learned, *blind]),
        ("unlabelled", shown[count:]),
        ("truth", truth),
    ):
        (scenes / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def pair(name: str, output: Path, model: Path, seed: int, changes: Sequence[str]) -> dict[str, Any]:
    """Build the pairs of one rule; all rules share the answers and scores of the first."""
    folder, first = output / "pairs" / name, output / "pairs" / next(iter(RULES))
    if folder != first:
        shutil.copytree(first / ".build", folder / ".build")
    scenes = output / "scenes"
    here = [
        f"build.source={scenes / 'unlabelled.jsonl'}", f"build.root={scenes}", f"build.model.model={model}",
        f"build.scores.model={output / 'judge'}", f"build.decide={RULES[name]}",
    ]  # fmt: skip
    return build("examples/preference_pairs/pairs.yaml", folder, seed, [*changes, *here])


# ---- report


def right_way_round(output: Path, name: str) -> float:
    """Compute the share of pairs whose chosen answer has the higher object F1, among those that differ."""
    scenes, pieces = output / "scenes", Pieces(Stream())
    where = {
        "path": f"{scenes / 'truth.jsonl'}",
        "ontology": f"{scenes / 'ontology.json'}",
        "root": f"{scenes}",
    }
    known = {prompt.uid: prompt for prompt in pieces.make("data", Piece("vision.closed_vocabulary", where))}
    pairs = pieces.make("data", Piece("vision.preference_pairs", {"path": f"{output / 'pairs' / name}"}))
    f1 = pieces.make("reward", Piece("vision.object_f1"))
    asked = [known[pair.uid] for pair in pairs for _ in pair.answers]
    scores = torch.tensor(f1(asked, [answer for pair in pairs for answer in pair.answers])).view(-1, 2)
    better, worse = (scores[:, 0] > scores[:, 1]).sum(), (scores[:, 0] < scores[:, 1]).sum()
    return float(better / (better + worse).clamp(min=1))


def exhibit_pairs(run: Run, num_prompts: int = 12) -> str:
    """Render pairs as DPO reads them."""
    rollouts = run.method.engine.rollout(run.method.sampler.draw(num_prompts, 2))
    seen = Measured({}, {}, rollouts, RewardTable.empty())
    return "".join(draw({"CLIP decides": seen}) for draw in run.report.pieces.visualizations)


def compared(measured: Mapping[str, Measured], built: Mapping[str, Mapping[str, Any]]) -> dict[str, Measured]:
    """Add pair counts, and how many fewer wrong objects captions name than the start's and than CLIP's."""
    compared = {}
    for name, result in measured.items():
        metrics, intervals = dict(result.metrics), dict(result.intervals)
        pairs = {
            "fewer than the start": (measured["start"], result),
            "fewer with clip": (result, measured["clip"]),
        }
        for label, (before, after) in pairs.items():
            if before is not after:
                metrics[label], intervals[label] = fewer(before.table, after.table)
        counts = built.get(name, {})
        columns = {"pairs": "train", "reversed": "flipped", "right way round": "right way round"}
        metrics |= {label: counts[key] for label, key in columns.items() if counts}
        compared[name] = dataclasses.replace(result, metrics=metrics, intervals=intervals)
    return compared


def fewer(before: RewardTable, after: RewardTable) -> tuple[float, tuple[float, float]]:
    """Compute how many fewer wrong objects a caption names on average, with a 95 % bootstrap interval.

    The two tables are paired by image, so the interval is narrower than those of both.
    """
    if before.uids != after.uids:
        raise ValueError("the two models were measured on different images; give them the same data")
    return mean_with_interval(before.at_end("hallucinated") - after.at_end("hallucinated"))


def mean_with_interval(change: Tensor) -> tuple[float, tuple[float, float]]:
    """Compute the mean of (M,) numbers with a 95 % bootstrap interval."""
    drawn = torch.randint(len(change), (1000, len(change)), generator=torch.Generator().manual_seed(0))
    ends = change[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=change.dtype))
    return float(change.mean()), tuple(ends.tolist())


def report(
    output: Path,
    seed: int,
    captioner: Trained,
    trained: Mapping[str, Trained],
    counts: Mapping[str, Mapping[str, Any]],
    drawn: str,
    seconds: float,
) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {"start": captioner.measured, **{name: run.measured for name, run in trained.items()}}
    measured = compared(measured, counts)
    shown = "".join(visualization(measured) for visualization in captioner.visualizations)
    note = (
        "A small LLaVA learned to caption images, and described others twice, once with contrastive decoding "
        "that strengthens hallucination. Pairs are ranked by a small CLIP (clip), by the hallucination ratio "
        "alone (no_reversal) or at random (random); DPO learns from each, with supervised fine-tuning on the "
        f"chosen answers. The contents of the pairs' images are not used. Seed {seed}. "
        "Objects: OpenMoji, CC BY-SA 4.0."
    )
    sections = [
        "<h1>Captions that hallucinate less</h1>",
        f"<p class=note>{note}</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        drawn,
        shown,
        "<h2>DPO</h2><div class=grid>",
        *curves({name: run.records for name, run in trained.items()}),
        "</div><h2>Learning to caption</h2><div class=grid>",
        *curves({"captioner": captioner.records}),
        "</div>",
    ]
    wrong = {name: result.table.at_end("hallucinated").long().tolist() for name, result in measured.items()}
    (output / "held_out.json").write_text(json.dumps(wrong) + "\n")
    summary = {"seed": seed, "seconds": round(seconds, 1), "pairs": dict(counts), **plain(measured)}
    show(measured, SHOWN, f"before and after, {seconds:.0f} s in all", digits=2)
    leave(output, summary, "mmrl pairs demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
