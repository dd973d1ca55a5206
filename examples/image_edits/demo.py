"""Demo of image editing: a small FLUX.2 klein learns to do what an instruction says.

It first learns from pairs of images, a fifth of which show another edit than the instruction says. AWM goes
on from there, with rewards that compare pixels with the right edit. A judge that no run learns from reads
shapes, colours and places by rule, in held-out images.

Run `python -m examples.image_edits.demo`. Each step is an ordinary `mmrl` command with a configuration of
this folder; all results are written to `--output`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo_arguments import demo_parser
from examples.image_edits.shape_edits import BY_TEXT, TEXTS, Edit
from examples.image_rl.demo import quiet
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from examples.worker_pool import each_seed
from mmrl.core.reward_table import Measured, RewardTable

HERE = "examples/image_edits"
JUDGE, REWARDS = "edited_shapes", ("edit_progress", "unmasked_identity")
Table = dict[str, dict[str, Tensor]]  # by run and reward, one number per held-out prompt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser(
        "image_edits", __doc__, "runs/demo-edit", "the run of AWM", seeds=3, fresh="a new model"
    )
    options = parser.parse_args(arguments)
    demo(Path(options.output), options.seed, options.seeds, options.overrides, jobs=options.jobs)
    return 0


def demo(
    output: Path,
    seed: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Run every seed, compare, write `summary.json` and `report.html`, and return the summary.

    All seeds share the images. `overrides` change the run of AWM, `changes` the other steps by name; `jobs`
    seeds run at the same time.
    """
    began, numbers, changes = time.perf_counter(), range(seed, seed + seeds), dict(changes or {})
    shutil.rmtree(output / "edits", ignore_errors=True)
    build(f"{HERE}/edits.yaml", output / "edits", seed, changes.get("edits", ()))
    found = each_seed(partial(one_seed, output, overrides=overrides, changes=changes), numbers, jobs)
    return report(output, found, time.perf_counter() - began)


@dataclass(frozen=True)
class Found:
    """Results of one seed."""

    table: Table
    records: Mapping[str, Sequence[Mapping[str, Any]]]  # the journal of every run
    grid: str  # images of both models
    seconds: float  # processor time


def one_seed(
    output: Path, seed: int, overrides: Sequence[str], changes: Mapping[str, Sequence[str]]
) -> Found:
    """Build a model, train it on pairs and by AWM, and measure both."""
    quiet()
    began, folder, edits = time.process_time(), output / f"seed-{seed}", output / "edits"
    shutil.rmtree(folder, ignore_errors=True)
    rows = [f"build.rows={edits / 'pairs.jsonl'}"]
    build(f"{HERE}/model.yaml", folder / "model", seed, [*changes.get("model", ()), *rows])

    def trained(name: str, rows: str, start: Path, more: Sequence[str]) -> Trained:
        paths = [
            f"policy.model={start}", f"data.path={edits / rows}.jsonl",
            f"evaluation.data.path={edits / 'test.jsonl'}",
        ]  # fmt: skip
        return train(make(f"{HERE}/{name}.yaml", folder / name, seed, [*paths, *more]))

    start = trained("matching", "pairs", folder / "model", changes.get("matching", ()))
    runs = {"start": start, "AWM": trained("awm", "train", start.model, overrides)}
    grid = start.visualizations[0]({name: run.measured for name, run in runs.items()})
    table = {
        name: {reward: run.measured.table.at_end(reward) for reward in (JUDGE, *REWARDS)}
        for name, run in runs.items()
    }
    records = {name: run.records for name, run in runs.items()}
    return Found(table, records, grid, round(time.process_time() - began, 1))


# ---- report


def figures(seeds: Sequence[int], asked: Sequence[Edit]) -> dict[str, tuple[str, Tensor, Sequence[int]]]:
    """Name every figure: its reward, its test rows as a mask, and the seeds that it averages."""
    whole = torch.ones(len(asked), dtype=torch.bool)
    kinds = {f"right, {kind}": torch.tensor([edit.kind == kind for edit in asked]) for kind in TEXTS}
    judged = {name: places for name, places in {"right": whole, **kinds}.items() if places.any()}
    return {
        **{name: (JUDGE, places, seeds) for name, places in judged.items()},
        **{f"right, seed {seed}": (JUDGE, whole, [seed]) for seed in seeds},
        **{reward: (reward, whole, seeds) for reward in REWARDS},
    }


def compared(tables: Mapping[int, Table], asked: Sequence[Edit]) -> dict[str, Measured]:
    """Compare AWM with its start: means over seeds, and the judge's figure of every seed.

    Intervals are over prompts; the prompts are the same before and after, so differences are paired.
    """
    shown = {name: Measured({}, {}, (), RewardTable.empty()) for name in ("start", "AWM", "difference")}
    for figure, (reward, places, seeds) in figures([*tables], asked).items():
        values = {
            name: torch.stack([tables[seed][name][reward][places] for seed in seeds]).mean(0)
            for name in ("start", "AWM")
        }
        values["difference"] = values["AWM"] - values["start"]
        for name, value in values.items():
            shown[name].metrics[figure], shown[name].intervals[figure] = mean_with_interval(value)
    return shown


def report(output: Path, found: Mapping[int, Found], seconds: float) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    lines = (output / "edits/test.jsonl").read_text().splitlines()
    asked = [BY_TEXT[json.loads(line)["prompt"]] for line in lines]
    measured = compared({seed: one.table for seed, one in found.items()}, asked)
    note = (
        "A small FLUX.2 klein learned from pairs of images, a fifth of which show another edit than the "
        "instruction says, then by AWM from rewards of pixels. The share of right edits is that of a judge "
        "that was never trained on: it reads shapes, colours and places by rule. Images are held out. "
        f"Seeds {', '.join(map(str, found))}; images of seed {min(found)}."
    )
    sections = [
        "<h1>Editing as told</h1>",
        f"<p class=note>{note}</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        found[min(found)].grid,
    ]
    for name, title in (("AWM", "AWM"), ("start", "Matching the flow")):
        journals = {f"seed {seed}": one.records[name] for seed, one in found.items()}
        sections += [f"<h2>{title}</h2><div class=grid>", *curves(journals), "</div>"]
    summary = {
        "seeds": list(found),
        "seconds": round(seconds, 1),
        "processor seconds by seed": [one.seconds for one in found.values()],
        **plain(measured),
    }
    show(measured, [*measured["start"].metrics], f"right edits before and after, {seconds:.0f} s in all")
    leave(output, summary, "mmrl editing demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
