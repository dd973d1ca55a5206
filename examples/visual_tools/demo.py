"""Demo of tools: a small VLM learns to look before it answers, and to search only where it must.

Photographs have a small sign with a heart, whose colour is asked for. A small Qwen2.5-VL learns by imitation,
from a part of the photographs, to read what `crop` and `zoom` show and to call them now and then, often at
the wrong place. GRPO and GiGPO go on from there with rewards for right answers alone. The comparison without
tools, the same model with a larger view, reads at least as many visual tokens.

With `--part search` captions can be searched, which half of the questions do not need: GRPO against OTC-PO,
which pays for fewer calls. The model first learns to search and to answer at once what is seen.

Run `python -m examples.visual_tools.demo [--photographs FOLDER] [--seeds 3]`. Each step is an ordinary `mmrl`
command with a configuration of this folder; all results are written to `--output`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo_arguments import demo_parser
from examples.preference_pairs.demo import mean_with_interval
from examples.video_grounding.demo import build, leave, make, plain, show, train
from examples.worker_pool import workers
from mmrl.core.episodes import join_episodes
from mmrl.core.reward_table import Measured, RewardTable

HERE = "examples/visual_tools"
LARGER_VIEW = ["build.max_pixels=2304"]  # 48 x 48
PARTS = ("look", "search")
# Of each part its runs, and where they begin.
RUNS = {
    "look": {"without": "direct", "grpo": "imitation", "gigpo": "imitation"},
    "search": {"search": "search_skills", "search_otc": "search_skills"},
}
STAGES = {  # of supervised learning
    "direct": ("direct",),
    "imitation": ("skills", "imitation"),
    "search_skills": ("search_skills",),
}
NAMES = {
    "direct": "no tools, start", "without": "no tools, GRPO", "imitation": "tools, start",
    "grpo": "tools, GRPO", "gigpo": "tools, GiGPO",
    "search_skills": "start", "search": "GRPO", "search_otc": "OTC-PO",
}  # fmt: skip
SHOWN = ("accuracy", "calls", "visual tokens")
TOKENS = {"with": 16, "without": 36}  # visual tokens of a view; a tool shows one more
Found = dict[str, dict[str, Tensor]]  # of every run, and of every measure: one number per held-out question
Seeds = Mapping[int, tuple[Found, dict[str, Any]]]
# What is compared, run by run: the questions are the same, so differences are paired.
COMPARED = {
    "look": (("grpo", "without"), ("grpo", "imitation"), ("gigpo", "imitation"), ("gigpo", "grpo")),
    "search": (("search", "search_skills"), ("search_otc", "search_skills"), ("search_otc", "search")),
}
TITLES = {"look": "Looking closer", "search": "Searching captions"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser(
        "visual_tools", __doc__, "runs/demo-tools", "reinforcement learning", seeds=3, fresh="a new model"
    )
    parser.add_argument(
        "--photographs",
        default=".venv/photographs",
        help="folder of photographs (default: .venv/photographs, where make puts some)",
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="by default look alone")
    options = parser.parse_args(arguments)
    demo(
        Path(options.photographs), Path(options.output), options.seed, options.seeds, options.overrides,
        parts=options.part or PARTS[:1], jobs=options.jobs,
    )  # fmt: skip
    return 0


def demo(
    photographs: Path,
    output: Path,
    seed: int = 0,
    seeds: int = 1,
    overrides: Sequence[str] = (),
    changes: Mapping[str, Sequence[str]] | None = None,
    *,
    parts: Sequence[str] = PARTS,
    jobs: int = 1,
) -> dict[str, Any]:
    """Run every seed, compare, write `summary.json` and `report.html`, and return the summary.

    All seeds share the photographs. `overrides` change the runs of reinforcement learning, `changes` the
    other steps by name.
    """
    began, changes = time.perf_counter(), dict(changes or {})
    for name in ("objects", "signs"):
        shutil.rmtree(output / name, ignore_errors=True)
    build(f"{HERE}/objects.yaml", output / "objects", seed, changes.get("objects", ()))
    where = [f"build.objects={output / 'objects/heart'}", f"build.photographs={photographs}"]
    build(f"{HERE}/signs.yaml", output / "signs", seed, [*where, *changes.get("signs", ())])
    numbers = range(seed, seed + seeds)
    with workers(jobs) as pool:
        found = in_pool(pool, output, numbers, overrides, changes, parts)
    return report(output, found, parts, time.perf_counter() - began)


def in_pool(
    pool: Executor,
    output: Path,
    numbers: Sequence[int],
    overrides: Sequence[str],
    changes: Mapping[str, Sequence[str]],
    parts: Sequence[str],
) -> dict[int, tuple[Found, dict[str, Any]]]:
    """Train every start of every seed, and each run as soon as its start is there."""
    runs = {name: start for part in parts for name, start in RUNS[part].items()}
    for number in numbers:
        shutil.rmtree(output / f"seed-{number}", ignore_errors=True)
    begun = {
        pool.submit(begin, start, output, number, changes): (number, start)
        for number in numbers
        for start in dict.fromkeys(runs.values())
    }
    found: dict[int, tuple[Found, dict[str, Any]]] = {number: ({}, {}) for number in numbers}
    learning: dict[tuple[int, str], Future[Any]] = {}
    for done in as_completed(begun):
        (number, start), (model, found[number][0][start]) = begun[done], done.result()
        for name in (name for name, its in runs.items() if its == start):
            options = [f"policy.model={model}", *changes.get("evaluate", ()), *overrides]
            learning[number, name] = pool.submit(learn, name, output, number, options)
    for (number, name), run in learning.items():
        _, found[number][0][name], found[number][1][name] = run.result()
    return found


def begin(
    start: str, output: Path, seed: int, changes: Mapping[str, Sequence[str]]
) -> tuple[Path, dict[str, Tensor]]:
    """Build a model and train it by imitation, in stages; return where it is, and what was measured."""
    model = output / f"seed-{seed}" / f"{start}_model"
    larger = LARGER_VIEW if start == "direct" else ()
    build(f"{HERE}/model.yaml", model, seed, [*larger, *changes.get("model", ())])
    measured: dict[str, Tensor] = {}
    *_, last = STAGES[start]
    for stage in STAGES[start]:
        measuring = changes.get("evaluate", ()) if stage == last else ["evaluation.num_prompts=1"]
        options = [f"policy.model={model}", *measuring, *changes.get(stage, ())]
        model, measured, _ = learn(stage, output, seed, options)
    return model, measured


def learn(
    name: str, output: Path, seed: int, options: Sequence[str]
) -> tuple[Path, dict[str, Tensor], list[Any]]:
    """Train as a configuration of this folder says; return the model, what was measured, and the journal."""
    wanted = make(
        f"{HERE}/{name}.yaml", output / f"seed-{seed}" / name, seed, [*places(output, name), *options]
    )
    run = train(wanted)
    return run.model, per_question(run.measured, name), list(run.records)


def places(output: Path, name: str) -> list[str]:
    """Return the overrides that name the files of a run."""
    signs, search = output / "signs", name.startswith("search")
    own = {"search": "train_search", "search_otc": "train_search", "imitation": "lessons"}
    rows = own.get(name, "train" if name in RUNS["look"] else name)
    files = {"data": rows, "evaluation.data": "test_search" if search else "test"}
    options = [f"{key}.path={signs / file}.jsonl" for key, file in files.items()]
    options += [f"{key}.root={signs}" for key in files]
    if search:
        engines = (
            ("evaluation.engine", "rollout.engine") if name in RUNS["search"] else ("evaluation.engine",)
        )
        options += [f"{engine}[1].tool[0].path={signs / 'captions.jsonl'}" for engine in engines]
    return options


def per_question(measured: Measured, name: str) -> dict[str, Tensor]:
    """Read of every held-out question whether it was answered, the calls, and the visual tokens."""
    table = join_episodes(measured.table)
    views = torch.tensor([1 + len(row.shown) for row in measured.rollouts], dtype=torch.float64)
    without = name in ("direct", "without")
    right = table.at_end("exact_match")
    return {
        "accuracy": right,
        "calls": torch.zeros_like(right) if without else table.at_end("tool_calls"),
        "visual tokens": views * TOKENS["without" if without else "with"],
    }


# ---- report


def compared(seeds: Seeds, part: str) -> tuple[dict[str, Measured], dict[str, dict[str, Any]]]:
    """Compute the mean of every run over seeds, and paired differences; intervals are over questions.

    The differences have their value for every seed too.
    """
    found = {number: each for number, (each, _) in seeds.items()}
    names = sorted({*RUNS[part], *RUNS[part].values()}, key=list(NAMES).index)
    runs = {NAMES[name]: Measured({}, {}, (), RewardTable.empty()) for name in names}
    differences: dict[str, dict[str, Any]] = {}
    for what in SHOWN:
        for name in names:
            values = torch.stack([each[name][what] for each in found.values()]).mean(0)
            shown = runs[NAMES[name]]
            shown.metrics[what], shown.intervals[what] = mean_with_interval(values)
        for name, other in COMPARED[part]:
            apart = [each[name][what] - each[other][what] for each in found.values()]
            mean, interval = mean_with_interval(torch.stack(apart).mean(0))
            differences.setdefault(f"{NAMES[name]} against {NAMES[other]}", {})[what] = {
                "mean": mean,
                "interval": list(interval),
                "by seed": [float(each.mean()) for each in apart],
            }
    return runs, differences


def report(output: Path, seeds: Seeds, parts: Sequence[str], seconds: float) -> dict[str, Any]:
    """Print the tables, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    note = (
        "A small Qwen2.5-VL is asked for the colour of a heart on a sign in a photograph. A view of the "
        "whole shows the sign, but not what is on it; <code>crop</code> and <code>zoom</code> do. Without "
        "tools the view is larger, so that no run with tools reads more visual tokens. "
        f"Answers are sampled. Seeds {', '.join(map(str, seeds))}; objects: OpenMoji, CC BY-SA 4.0."
    )
    sections = ["<h1>Look before you answer</h1>", f"<p class=note>{note}</p>"]
    summary: dict[str, Any] = {"seeds": list(seeds), "seconds": round(seconds, 1)}
    for part in parts:
        measured, differences = compared(seeds, part)
        summary[part] = {**plain(measured), "differences": differences}
        show(measured, SHOWN, f"{TITLES[part]}, {seconds:.0f} s in all")
        sections += [f"<h2>{TITLES[part]}</h2>", metric_table(measured), difference_table(differences)]
        for name in RUNS[part]:
            journals = {f"seed {number}": each[name] for number, (_, each) in seeds.items()}
            sections += [f"<h2>{NAMES[name]}</h2><div class=grid>", *curves(journals), "</div>"]
        last = list(RUNS[part])[-1]
        sections += [f"<h2>Conversations, {NAMES[last]}</h2>", talks(output / f"seed-{min(seeds)}" / last)]
    output.mkdir(parents=True, exist_ok=True)
    leave(output, summary, "mmrl tools demo", sections)
    return summary


def difference_table(differences: Mapping[str, Mapping[str, Any]]) -> str:
    """Lay out paired differences."""
    from mmrl.reporting.html import metric_table

    shown = {
        name: Measured(
            {what: each["mean"] for what, each in row.items()},
            {what: tuple(each["interval"]) for what, each in row.items()},
            (),
            RewardTable.empty(),
        )
        for name, row in differences.items()
    }
    return metric_table(shown)


def talks(folder: Path) -> str:
    """Lay out conversations of a run with the images that tools showed."""
    from mmrl.reporting.html.samples import read_samples, samples_section

    return samples_section(read_samples(folder, {}))


if __name__ == "__main__":
    sys.exit(main())
