"""Demo of web pages: a small VLM learns to click the square that is named, in a real browser.

A small LLaVA learns from screenshots and clicks, one in five misplaced, to write the action `left_click` with
a place. GRPO goes on from there: it clicks in Chromium, and is rewarded for the right square alone. The best
click that ignores the page is shown besides.

Run `python -m examples.browser_clicks.demo [--seeds 3]`. Each step is an ordinary `mmrl` command with a
configuration of this folder; all results are written to `--output`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.browser_clicks.click_lessons import TASK
from examples.demo_arguments import demo_parser
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from mmrl.core.episodes import join_episodes
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.vision.environments.browser_tasks import COLORS, END, make_task

HERE = "examples/browser_clicks"
ROWS = {"lessons": "lessons", "grpo": "train"}  # the rows of each run
NAMES = {"fixed": "fixed click", "lessons": "start", "grpo": "GRPO"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser("browser_clicks", __doc__, "runs/demo-browser", "GRPO", seeds=1)
    options = parser.parse_args(arguments)
    demo(Path(options.output), options.seed, options.seeds, options.overrides)
    return 0


def demo(
    output: Path,
    seed: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Run every seed, compare, write `summary.json` and `report.html`, and return the summary.

    `overrides` change GRPO, `changes` the other steps by name.
    """
    began, numbers = time.perf_counter(), range(seed, seed + seeds)
    runs = {
        number: one_seed(output / f"seed-{number}", number, overrides, changes or {}) for number in numbers
    }
    return report(output, runs, time.perf_counter() - began)


def one_seed(
    folder: Path, seed: int, overrides: Sequence[str], changes: Mapping[str, Sequence[str]]
) -> dict[str, Trained]:
    """Build pages and a model, and train it by lessons and then by GRPO."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("pages", "model"):
        build(f"{HERE}/{name}.yaml", folder / name, seed, changes.get(name, ()))
    trained, model = {}, folder / "model"
    for name, rows in ROWS.items():
        options = [
            f"policy.model={model}", f"data.path={folder / 'pages' / rows}.jsonl",
            f"data.root={folder / 'pages'}", f"evaluation.data.path={folder / 'pages/test.jsonl'}",
        ]  # fmt: skip
        more = overrides if name == "grpo" else changes.get(name, ())
        trained[name] = train(make(f"{HERE}/{name}.yaml", folder / name, seed, [*options, *more]))
        model = trained[name].model
    return trained


def fixed_clicks(rows: Path) -> Tensor:
    """Score the best click that ignores the page: 1 for pages with the named square in the commonest cell."""
    cells = []
    for line in rows.read_text().splitlines():
        task = make_task(TASK, json.loads(line)["seed"])
        (color,) = task.target[END]
        (cell,) = re.findall(rf"grid-area: ([\d /]+); background: {COLORS[color]}", task.html)
        cells.append(cell)
    ((best, _),) = Counter(cells).most_common(1)
    return torch.tensor([float(cell == best) for cell in cells])  # (pages,)


def compared(clicks: Mapping[str, Sequence[Tensor]]) -> dict[str, Measured]:
    """Compute the accuracy of every run, a mean over seeds, and the gain; intervals are over pages.

    `clicks` maps a run to one tensor (pages,) a seed, 1 for a right click. Gains are paired.
    """
    means = {NAMES[name]: torch.stack(list(each)).double().mean(0) for name, each in clicks.items()}
    means["gain"] = means["GRPO"] - means["start"]
    shown = {}
    for name, values in means.items():
        mean, interval = mean_with_interval(values)
        shown[name] = Measured({"accuracy": mean}, {"accuracy": interval}, (), RewardTable.empty())
    return shown


def report(output: Path, runs: Mapping[int, Mapping[str, Trained]], seconds: float) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table
    from mmrl.reporting.html.samples import read_samples, samples_section

    clicks = {
        name: [join_episodes(each[name].measured.table).at_end("click") for each in runs.values()]
        for name in ROWS
    }
    clicks["fixed"] = [fixed_clicks(output / f"seed-{number}/pages/test.jsonl") for number in runs]
    measured = compared(clicks)
    by_seed = {
        NAMES[name]: [round(float(right.mean()), 4) for right in each] for name, each in clicks.items()
    }
    summary = {"seeds": list(runs), "seconds": round(seconds, 1), "by seed": by_seed, **plain(measured)}
    show(measured, ("accuracy",), f"clicks on what is named, {seconds:.0f} s in all")
    note = (
        "A small LLaVA sees a page with four squares and reads which one to click. It learned from "
        "clicks of which one in five is misplaced; GRPO went on in Chromium, rewarded for the right square "
        "alone. The fixed click is the best one that ignores the page. "
        f"Held-out pages, clicks are sampled. Seeds {', '.join(map(str, runs))}."
    )
    sections = [
        "<h1>Click what is named</h1>",
        f"<p class=note>{note}</p>",
        metric_table(measured),
        "<h2>GRPO</h2><div class=grid>",
        *curves({f"seed {number}": each["grpo"].records for number, each in runs.items()}),
        "</div><h2>Clicks</h2>",
        samples_section(read_samples(output / f"seed-{min(runs)}" / "grpo", {})),
    ]
    leave(output, summary, "mmrl browser demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
