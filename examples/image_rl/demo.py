"""The image demo: train a small flow model on real captioned pictures, then improve it three ways by the
configurations `demo_image_*.yaml`, and compare.

`python -m examples.image_rl.demo`; everything lands in `--output`, and each step is an ordinary `mmrl`
command. What comes before reinforcement learning is kept, and made anew when what it depends on has changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from mmrl.config.loading import read
from mmrl.config.schema import Config, load
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.reporting.metrics import Journal

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

METHODS = ("flow_grpo", "tp_grpo", "awm")
BUILT = ("pictures", "judge", "model")
REWARDS = ("clip_score", "coloured_shape")
SHOWN = (*REWARDS, *(f"gain in {name}" for name in REWARDS), "updates", "seconds", "network evaluations")
# What decides how the start comes out, besides configurations and the source of builders.
VERSIONS = ("mmrl", "torch", "transformers", "diffusers", "open_clip_torch", "easy-vqa")


@dataclass(frozen=True)
class Start:
    """Where reinforcement learning starts: the model folder, what it is worth, how it was trained, what was
    built."""

    model: Path
    measured: Measured
    records: Sequence[Mapping[str, Any]]
    built: Mapping[str, Any]


@dataclass
class Spent:
    """Seconds and network evaluations of training, without measuring and saving. An evaluation is a row
    through the network, in rollouts, probes, references or learning."""

    seconds: float = 0.0
    evaluations: int = 0
    log: list[tuple[float, int]] = field(default_factory=list)  # behind every step

    def watch(self, run: Run) -> Run:
        """Count from here on, whenever the run has finished a step."""
        finish, seen = run.finish, [run.policy.evaluations]

        def counted(*of_step: Any) -> None:
            self.seconds += time.perf_counter() - run.report.began
            self.evaluations += run.policy.evaluations - seen[0]
            self.log.append((self.seconds, self.evaluations))
            finish(*of_step)
            seen[0] = run.policy.evaluations

        run.finish = counted
        return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="examples.image_rl.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", default="runs/demo-image", help="where everything lands (default: runs/demo-image)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the three methods")
    given = parser.parse_args(arguments)
    quiet()
    demo(Path(given.output), given.seed, given.overrides)
    return 0


def quiet() -> None:
    """Keep libraries from talking about what is meant to be so: parts that a pipeline does without."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def demo(
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    start_overrides: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Prepare, train, compare; leave `summary.json` and `report.html`, and give what the summary holds.

    `overrides` change the three methods, `start_overrides` by name what is built, and the run `matching`.
    """
    began = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    start = prepare(output, seed, start_overrides or {})
    trained, drawn = {}, []
    for name in METHODS:
        shutil.rmtree(output / name, ignore_errors=True)
        run, spent = begin(name, output, seed, start.model, overrides)
        trained[name] = compared(train(run), start.measured, run.config.max_steps, spent)
        drawn += visualizations(name, run)
    return report(output, seed, start, trained, drawn, time.perf_counter() - began)


def begin(
    name: str,
    output: Path,
    seed: int,
    start: Path,
    overrides: Sequence[str],
    shared: Path | None = None,
) -> tuple[Run, Spent]:
    """Make the run of a method, from the weights in `start`, and watch what it spends. Prompts and the reward
    model lie in `shared`, or with the output."""
    here = [f"policy.model={start}", *places(shared or output)]
    spent = Spent()
    return spent.watch(make(f"demo_image_{name}.yaml", output / name, seed, [*overrides, *here])), spent


def places(output: Path, data: Sequence[str] = ("data", "evaluation.data")) -> list[str]:
    """Say where prompts and the reward model lie."""
    judged = [place.replace("data", "rewards.0.model") for place in data]
    return [f"{place}.path={output / 'pictures' / 'prompts.jsonl'}" for place in data] + [
        f"{place}={output / 'judge'}" for place in judged
    ]


# ---- before reinforcement learning


def prepare(output: Path, seed: int, changes: Mapping[str, Sequence[str]]) -> Start:
    """Build pictures, reward model and flow model, and match the flow to the pictures, unless that is done
    already."""
    pictures, kept = output / "pictures", output / "start.json"
    here = {
        "pictures": [],
        "judge": [f"build.{split}={pictures / split}.jsonl" for split in ("train", "test")]
        + [f"build.root={pictures}"],
        "model": [f"build.texts={pictures / 'prompts.jsonl'}"],
        "matching": [
            f"policy.model={output / 'model'}",
            f"data.path={pictures / 'train.jsonl'}",
            f"data.root={pictures}",
            *places(output, ["evaluation.data"]),
        ],
    }
    changed = {name: [*changes.get(name, ()), *given] for name, given in here.items()}
    key = fingerprint(changed, seed)
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if known.get("key") == key and Path(known["model"]).is_dir():
        print(f"{output}: going on from {known['model']}; delete {kept} to train it anew", flush=True)
        return Start(
            Path(known["model"]), remeasured(changed["matching"], seed, known["model"]),
            Journal(output / "matching").read(), known["built"],
        )  # fmt: skip
    kept.unlink(missing_ok=True)
    for name in changed:
        shutil.rmtree(output / name, ignore_errors=True)
    built = {name: build(f"demo_image_{name}.yaml", output / name, seed, changed[name]) for name in BUILT}
    one = train(make("examples/image_rl/matching.yaml", output / "matching", seed, changed["matching"]))
    kept.write_text(json.dumps({"key": key, "model": str(one.model), "built": built}, indent=2) + "\n")
    return Start(one.model, one.measured, one.records, built)


def fingerprint(changed: Mapping[str, Sequence[str]], seed: int) -> str:
    """Hash what the start depends on: configurations, seed, the source of builders, versions of packages."""
    raw = {name: read(f"demo_image_{name}.yaml", given) for name, given in changed.items()}
    sources = [path.read_text() for path in sorted((Path(__file__).parent / "builders").glob("*.py"))]
    versions = {name: version(name) for name in VERSIONS}
    words = json.dumps([raw, seed, sources, versions], sort_keys=True)
    return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()


def version(package: str) -> str:
    """Tell which version of a package is installed, if any."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def remeasured(changes: Sequence[str], seed: int, model: str) -> Measured:
    """Measure the start once more."""
    from mmrl.build import load_evaluator

    here = [*changes, f"seed={seed}", f"policy.model={model}"]
    return load_evaluator(load("examples/image_rl/matching.yaml", here, Config)).measure()


# ---- what is shown


def compared(one: Trained, start: Measured, updates: int, spent: Spent) -> Trained:
    """Put beside what was measured how much better it is than the start, and what that cost."""
    metrics, intervals = dict(one.measured.metrics), dict(one.measured.intervals)
    for name in REWARDS:
        metrics[f"gain in {name}"], intervals[f"gain in {name}"] = gain(start.table, one.measured.table, name)
    metrics |= {"updates": updates, "seconds": round(spent.seconds), "network evaluations": spent.evaluations}
    measured = dataclasses.replace(one.measured, metrics=metrics, intervals=intervals)
    return dataclasses.replace(one, measured=measured)


def gain(before: RewardTable, after: RewardTable, name: str) -> tuple[float, tuple[float, float]]:
    """Average how much better rows became, with a 95 % bootstrap interval over prompts.

    Row by row the two tables answer the same prompts from the same noise, so this is a paired comparison, and
    narrower than the intervals of both.
    """
    change = after.at_end(name) - before.at_end(name)
    number = {uid: i for i, uid in enumerate(dict.fromkeys(before.uids))}
    group = torch.tensor([number[uid] for uid in before.uids])
    means = torch.stack([change[group == i].nanmean() for i in range(len(number))])
    drawn = torch.randint(len(means), (1000, len(means)), generator=torch.Generator().manual_seed(0))
    ends = means[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=means.dtype))
    return float(change.nanmean()), tuple(ends.tolist())


def visualizations(name: str, run: Run, num_prompts: int = 12) -> list[str]:
    """Draw what the method itself looks at: rollouts of its own engine, as its own exhibits show them."""
    from mmrl.training.score import score

    if len(run.config.rollout.engine) < 2:
        return []
    rollouts = run.method.engine.rollout(list(run.evaluator.data)[:num_prompts])
    seen = Measured({}, {}, rollouts, score(run.method.rewards, rollouts))
    return [visualization({name: seen}) for visualization in run.report.pieces.visualizations]


def report(
    output: Path,
    seed: int,
    start: Start,
    trained: Mapping[str, Trained],
    drawn: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """Show the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {"start": start.measured, **{name: one.measured for name, one in trained.items()}}
    # Every method's own page shows the same grid; the first that only has pictures draws it for all.
    grids = [visualization(measured) for visualization in trained[METHODS[0]].visualizations]
    note = (
        "A small Stable Diffusion 3 on pixels, trained on captioned pictures, before and after reinforcement "
        "learning. The reward is clip_score, of a small CLIP trained on the same pictures; coloured_shape "
        f"reads colour and shape by rule and was never trained on. Seed {seed}."
    )
    sections = [
        "<h1>Drawing what is asked for</h1>",
        f"<p class=note>{note}</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        *grids,
        *drawn,
        "<h2>Reinforcement learning</h2><div class=grid>",
        *curves({name: one.records for name, one in trained.items()}),
        "</div><h2>Matching the flow</h2><div class=grid>",
        *curves({"matching": start.records}),
        "</div>",
    ]
    summary = {"seed": seed, "seconds": round(seconds, 1), "built": dict(start.built), **plain(measured)}
    show(measured, SHOWN, f"before and after, {seconds:.0f} s in all")
    leave(output, summary, "mmrl image demo", sections)
    return summary


if __name__ == "__main__":
    sys.exit(main())
