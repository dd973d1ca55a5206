"""The demo of preference pairs without a judge: a small LLaVA learns to caption and answers pictures twice, a
small CLIP says which answer fits, and DPO learns from that; held-out pictures show if it hallucinates less.

`python -m examples.preference_pairs.demo [--textures FOLDER]`; everything lands in `--output`, and each step
is an ordinary `mmrl` command with a configuration `demo_pairs_*.yaml`. The two baselines learn from the same
answers: paired by the dial alone, without CLIP's reversal, and paired by a coin.
"""

from __future__ import annotations

import argparse
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

from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from mmrl.config.binding import Pieces
from mmrl.config.schema import Piece
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.rng import Stream

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

RULES = {"clip": "score", "no_reversal": "dial", "random": "random"}  # how `vision.clip_pairs` decides
BUILT = ("objects", "scenes", "judge", "model")
UNSEEN = 1 / 5  # as many captions are learned once more without their picture
ASKED = "Describe this image."
CAPTIONED = 1 / 4  # of the pictures that are not held out; of the rest nobody tells what they show
SHOWN = (
    "precision", "recall", "f1", "CHAIRi", "CHAIRs", "hallucinated objects", "fewer than the start",
    "fewer with clip", "completions/mean_length", "pairs", "reversed",
    "right way round",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(
        prog="examples.preference_pairs.demo", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--textures",
        default=".venv/textures",
        help="a folder of pictures to lay objects on (default: .venv/textures, where make puts some)",
    )
    parser.add_argument(
        "--output", default="runs/demo-pairs", help="where everything lands (default: runs/demo-pairs)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the three DPO runs")
    given = parser.parse_args(arguments)
    demo(Path(given.textures), Path(given.output), given.seed, given.overrides)
    return 0


def demo(
    textures: Path,
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Prepare, pair, train, compare; leave `summary.json` and `report.html`, and give what the summary holds.

    `overrides` change the three runs of DPO, `changes` by name what comes before them.
    """
    began = time.perf_counter()
    changes = changes or {}
    for name in (*BUILT, "captioner", "pairs", *RULES):
        shutil.rmtree(output / name, ignore_errors=True)
    captioner = caption(textures, output, seed, changes)
    told, trained, drawn = {}, {}, ""
    for name in RULES:
        told[name] = pair(name, output, captioner.model, seed, changes.get("pairs", ()))
        told[name]["right way round"] = right_way_round(output, name)
        here = [f"data.path={output / 'pairs' / name}", f"policy.model={captioner.model}", *held_out(output)]
        run = make("examples/preference_pairs/dpo.yaml", output / name, seed, [*overrides, *here])
        trained[name] = train(run)
        drawn += exhibit_pairs(run) if name == "clip" else ""
    return report(output, seed, captioner, trained, told, drawn, time.perf_counter() - began)


# ---- before DPO


def caption(textures: Path, output: Path, seed: int, changes: Mapping[str, Sequence[str]]) -> Trained:
    """Build pictures, the encoder that scores and the model, and teach the model to caption."""
    scenes = output / "scenes"
    captioned = scenes / "captioned.jsonl"
    here = {
        "scenes": [f"build.objects={output / 'objects'}", f"build.backgrounds={textures}"],
        "judge": [*(f"build.{split}={captioned}" for split in ("train", "test")), f"build.root={scenes}"],
    }
    for name in BUILT:
        given = [*changes.get(name, ()), *here.get(name, ())]
        build(f"demo_pairs_{name}.yaml", output / name, seed, given)
        if name == "scenes":
            part(scenes)
    here = [
        f"policy.model={output / 'model'}",
        f"data.path={scenes / 'lessons.jsonl'}",
        f"data.root={scenes}",
    ]
    given = [*changes.get("captioner", ()), *here, *held_out(output)]
    return train(make("examples/preference_pairs/captioner.yaml", output / "captioner", seed, given))


def held_out(output: Path) -> list[str]:
    """Say where the pictures lie on which models are measured."""
    scenes = output / "scenes"
    names = {"path": scenes / "test.jsonl", "ontology": scenes / "ontology.json", "root": scenes}
    return [f"evaluation.data.{key}={value}" for key, value in names.items()]


def part(scenes: Path) -> None:
    """Part the pictures into those with a caption to learn from, and those of which only the picture is
    kept."""
    rows = [json.loads(line) for line in (scenes / "train.jsonl").read_text().splitlines()]
    count = round(CAPTIONED * len(rows))
    shown = [{"id": row["id"], "image": row["image"], "question": ASKED} for row in rows]
    learned = [
        {**mine, "answer": row["captions"][0], "prompt": row["captions"][0]}
        for mine, row in zip(shown[:count], rows, strict=False)
    ]
    # A language model knows what captions are like before it sees a picture; this one learns it on the way.
    blind = [
        {"id": f"{row['id']} unseen", "question": row["question"], "answer": row["answer"]}
        for row in learned[:: round(1 / UNSEEN)]
    ]
    # What the other pictures show is known to the measurement alone, under the ids of the pairs.
    truth = [{**row, "id": f"unlabelled.jsonl:{i}"} for i, row in enumerate(rows[count:], 1)]
    for name, some in (
        ("captioned", learned),
        ("lessons", [*learned, *blind]),
        ("unlabelled", shown[count:]),
        ("truth", truth),
    ):
        (scenes / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def pair(name: str, output: Path, model: Path, seed: int, changes: Sequence[str]) -> dict[str, Any]:
    """Build the pairs of one rule. Answers and scores are made once, and the other rules take them over."""
    folder, first = output / "pairs" / name, output / "pairs" / next(iter(RULES))
    if folder != first:
        shutil.copytree(first / ".build", folder / ".build")
    scenes = output / "scenes"
    here = [
        f"build.source={scenes / 'unlabelled.jsonl'}", f"build.root={scenes}", f"build.model.model={model}",
        f"build.scores.model={output / 'judge'}", f"build.decide={RULES[name]}",
    ]  # fmt: skip
    return build("examples/preference_pairs/pairs.yaml", folder, seed, [*changes, *here])


# ---- what is shown


def right_way_round(output: Path, name: str) -> float:
    """Measure the share of pairs whose chosen answer names objects better than the rejected one (F1), among
    those that differ in it."""
    scenes, pieces = output / "scenes", Pieces(Stream())
    where = {
        "path": f"{scenes / 'truth.jsonl'}",
        "ontology": f"{scenes / 'ontology.json'}",
        "root": f"{scenes}",
    }
    known = {one.uid: one for one in pieces.make("data", Piece("vision.closed_vocabulary", where))}
    pairs = pieces.make("data", Piece("vision.preference_pairs", {"path": f"{output / 'pairs' / name}"}))
    f1 = pieces.make("reward", Piece("vision.object_f1"))
    asked = [known[one.uid] for one in pairs for _ in one.answers]
    scores = torch.tensor(f1(asked, [answer for one in pairs for answer in one.answers])).view(-1, 2)
    better, worse = (scores[:, 0] > scores[:, 1]).sum(), (scores[:, 0] < scores[:, 1]).sum()
    return float(better / (better + worse).clamp(min=1))


def exhibit_pairs(run: Run, num_prompts: int = 12) -> str:
    """Draw pairs as DPO reads them."""
    rollouts = run.method.engine.rollout(run.method.sampler.draw(num_prompts, 2))
    seen = Measured({}, {}, rollouts, RewardTable.empty())
    return "".join(draw({"CLIP decides": seen}) for draw in run.report.pieces.visualizations)


def compared(measured: Mapping[str, Measured], told: Mapping[str, Mapping[str, Any]]) -> dict[str, Measured]:
    """Put beside what was measured how many wrong objects a caption names, how many fewer than the start's,
    and how many fewer the pairs that CLIP decided lead to."""
    found = {}
    for name, one in measured.items():
        metrics, intervals = dict(one.metrics), dict(one.intervals)
        pairs = {"fewer than the start": (measured["start"], one), "fewer with clip": (one, measured["clip"])}
        for label, (before, after) in pairs.items():
            if before is not after:
                metrics[label], intervals[label] = fewer(before.table, after.table)
        counts = told.get(name, {})
        columns = {"pairs": "train", "reversed": "flipped", "right way round": "right way round"}
        metrics |= {label: counts[key] for label, key in columns.items() if counts}
        found[name] = dataclasses.replace(one, metrics=metrics, intervals=intervals)
    return found


def fewer(before: RewardTable, after: RewardTable) -> tuple[float, tuple[float, float]]:
    """Average how many fewer wrong objects a caption names, with a 95 % bootstrap interval over pictures.

    Caption by caption the two tables are about the same pictures, so the interval is narrower than those of
    both.
    """
    if before.uids != after.uids:
        raise ValueError("the two models were measured on different pictures; give them the same data")
    return mean_with_interval(before.at_end("hallucinated") - after.at_end("hallucinated"))


def mean_with_interval(change: Tensor) -> tuple[float, tuple[float, float]]:
    """Average (M,) numbers, with a 95 % bootstrap interval."""
    drawn = torch.randint(len(change), (1000, len(change)), generator=torch.Generator().manual_seed(0))
    ends = change[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=change.dtype))
    return float(change.mean()), tuple(ends.tolist())


def report(
    output: Path,
    seed: int,
    captioner: Trained,
    trained: Mapping[str, Trained],
    told: Mapping[str, Mapping[str, Any]],
    drawn: str,
    seconds: float,
) -> dict[str, Any]:
    """Show the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {"start": captioner.measured, **{name: one.measured for name, one in trained.items()}}
    measured = compared(measured, told)
    shown = "".join(visualization(measured) for visualization in captioner.visualizations)
    note = (
        "A small LLaVA learned to caption pictures, and answered others twice, once less mindful of the "
        "picture. Pairs are decided by a small CLIP (clip), by the dial alone (no_reversal) or by a coin "
        "(random); DPO learns from each, and imitates the better answers besides. Nobody told what the "
        f"pictures of the pairs show. Seed {seed}. "
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
        *curves({name: one.records for name, one in trained.items()}),
        "</div><h2>Learning to caption</h2><div class=grid>",
        *curves({"captioner": captioner.records}),
        "</div>",
    ]
    wrong = {name: one.table.at_end("hallucinated").long().tolist() for name, one in measured.items()}
    (output / "held_out.json").write_text(json.dumps(wrong) + "\n")
    summary = {"seed": seed, "seconds": round(seconds, 1), "pairs": dict(told), **plain(measured)}
    show(measured, SHOWN, f"before and after, {seconds:.0f} s in all", digits=2)
    leave(output, summary, "mmrl pairs demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
