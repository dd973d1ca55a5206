"""Demo of images as tokens: DPO against GRPO for a small Emu3 that draws counted shapes.

The study (arXiv 2505.17017) at our size. The model first imitates images, a share of which show something
else than their caption. GRPO and DPO go on from there, each with two rewards: a rule that reads count,
colours and shapes, and a noisier one that only measures ink. DPO's pool has as many images as GRPO draws. A
quarter of the captions is held out of all training.

Run `python -m examples.picture_tokens.demo`. Each step is an ordinary `mmrl` command with a configuration of
this folder; all results are written to `--output`.
"""

from __future__ import annotations

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
from examples.image_rl.demo import quiet
from examples.picture_tokens.counted_shapes import ASKED
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from examples.worker_pool import each_seed
from mmrl.core.reward_table import Measured, RewardTable

HERE = "examples/picture_tokens"
SHARED = ("captions", "model")  # built once for all seeds
PIECE = {"judge": "counted_shapes", "ink": "ink_amount"}  # the two rewards
RUNS = tuple(f"{method}-{reward}" for method in ("grpo", "dpo") for reward in PIECE)
MEASURED = ("right", "count", "colour", "shape", "ink")
Table = dict[str, dict[str, Tensor]]  # by run and reward, one mean per caption of `ASKED`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser(
        "picture_tokens", __doc__, "runs/demo-pictures", "GRPO and DPO", seeds=3, fresh="a new cold start"
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

    All seeds share captions and tokenizer. `overrides` change the runs of GRPO and DPO, `changes` other steps
    by name; `jobs` seeds run at the same time.
    """
    began, numbers, changes = time.perf_counter(), range(seed, seed + seeds), dict(changes or {})
    for name in SHARED:
        shutil.rmtree(output / name, ignore_errors=True)
        build(f"{HERE}/{name}.yaml", output / name, seed, changes.get(name, ()))
    found = each_seed(partial(one_seed, output, overrides=overrides, changes=changes), numbers, jobs)
    return report(output, found, time.perf_counter() - began)


@dataclass(frozen=True)
class Found:
    """Results of one seed."""

    table: Table
    records: Mapping[str, Sequence[Mapping[str, Any]]]  # the journal of every run
    grid: str  # images of all runs
    seconds: float  # processor time


def one_seed(
    output: Path, seed: int, overrides: Sequence[str], changes: Mapping[str, Sequence[str]]
) -> Found:
    """Cold start, pool, and both methods with both rewards; measure all."""
    quiet()
    began, folder, captions = time.process_time(), output / f"seed-{seed}", output / "captions"
    shutil.rmtree(folder, ignore_errors=True)

    def trained(name: str, config: str, start: Path, more: Sequence[str]) -> Trained:
        paths = [f"policy.model={start}", f"evaluation.data.path={captions / 'test.jsonl'}"]
        return train(make(f"{HERE}/{config}.yaml", folder / name, seed, [*more, *paths]))

    runs = {"start": trained("cold_start", "cold_start", output / "model", changes.get("cold_start", ()))}
    start, asked = runs["start"].model, captions / "train.jsonl"
    paths = [f"build.model.model={start}", f"build.prompts.path={asked}"]
    build(f"{HERE}/pool.yaml", folder / "pool", seed, [*changes.get("pool", ()), *paths])
    for name in RUNS:
        method, reward = name.split("-")
        own = {
            "grpo": [
                f"data.path={asked}",
                f"rewards.0.name=examples.picture_tokens.counted_shapes:{PIECE[reward]}",
            ],
            "dpo": [
                f"data.path={folder / 'pool/train.jsonl'}",
                f"data.root={folder / 'pool'}",
                f"rewards.0.key={reward}",
            ],
        }[method]
        runs[name] = trained(name, method, start, [*overrides, *own, f"rewards.0.label={reward}"])
    grid = runs["start"].visualizations[0]({name: run.measured for name, run in runs.items()})
    table = {name: {of: by_caption(run.measured.table, of) for of in MEASURED} for name, run in runs.items()}
    records = {name: run.records for name, run in runs.items()}
    return Found(table, records, grid, round(time.process_time() - began, 1))


def by_caption(table: RewardTable, name: str) -> Tensor:
    """Average a reward over the images of each caption of `ASKED` (48,)."""
    uids, values = list(table.uids), table.at_end(name)
    return torch.stack(
        [values[[i for i, uid in enumerate(uids) if uid == one.caption]].mean() for one in ASKED]
    )


# ---- report


def compared(tables: Mapping[int, Table]) -> dict[str, Measured]:
    """Average every run over seeds, in domain and held out, and its gain over the start.

    Intervals are over captions, which are the same before and after: gains are paired.
    """
    held_out = torch.tensor([one.held_out for one in ASKED])
    names = [*next(iter(tables.values()))]
    shown = {name: Measured({}, {}, (), RewardTable.empty()) for name in names}

    def put(run: str, figure: str, values: Tensor) -> None:
        shown[run].metrics[figure], shown[run].intervals[figure] = mean_with_interval(values)

    for run in names:
        for where, places in (("in domain", ~held_out), ("held out", held_out)):
            for of in MEASURED:
                after, before = (
                    torch.stack([table[name][of][places] for table in tables.values()]).mean(0)
                    for name in (run, "start")
                )
                put(run, f"{of}, {where}", after)
                if of == "right" and run != "start":
                    put(run, f"gain in right, {where}", after - before)
            for seed, table in tables.items():
                put(run, f"right, {where}, seed {seed}", table[run]["right"][places])
    return shown


def report(output: Path, found: Mapping[int, Found], seconds: float) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = compared({seed: one.table for seed, one in found.items()})
    note = (
        "A small Emu3 imitates images as tokens, of which a share show something else than their caption. "
        "GRPO and DPO go on from the same start; DPO's pool has as many images as GRPO draws. The rewards "
        "are a rule that reads count, colours and shapes (judge), and the amount of ink, which sees neither "
        "places nor shapes (ink). An image is right if the rule finds nothing wrong. Held-out captions occur "
        f"in no training. Seeds {', '.join(map(str, found))}; images of seed {min(found)}."
    )
    sections = [
        "<h1>Drawing with tokens: DPO against GRPO</h1>",
        f"<p class=note>{note}</p>",
        "<h2>In domain and held out</h2>",
        metric_table(measured),
        found[min(found)].grid,
    ]
    first = found[min(found)].records
    for title, names in (("GRPO and DPO", RUNS), ("Cold start", ("start",))):
        journals = {name: first[name] for name in names}
        sections += [f"<h2>{title}</h2><div class=grid>", *curves(journals), "</div>"]
    summary = {
        "seeds": list(found),
        "seconds": round(seconds, 1),
        "processor seconds by seed": [one.seconds for one in found.values()],
        **plain(measured),
    }
    show(measured, [*measured[RUNS[0]].metrics], f"before and after, {seconds:.0f} s in all")
    leave(output, summary, "mmrl demo of images as tokens", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
