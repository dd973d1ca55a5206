"""The image demo: train a small flow model on captions, improve it by three RL methods, compare.

`python -m examples.image_rl.demo` runs the configurations beside this file; results go to `--output`. Each
step is an ordinary `mmrl` command. What precedes reinforcement learning is cached, and rebuilt if its
configurations, seed, code or packages have changed.
"""

from __future__ import annotations

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

from examples.demo_arguments import demo_parser
from examples.video_grounding.demo import Trained, build, leave, make, plain, show, train
from mmrl.config.loading import read
from mmrl.config.schema import Config, load
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.diffusion import builders
from mmrl.reporting.metrics import Journal

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

METHODS = ("flow_grpo", "tp_grpo", "awm")
BUILT = ("images", "judge", "model")
HERE = Path(__file__).parent
REWARDS = ("clip_score", "coloured_shape")
SHOWN = (*REWARDS, *(f"gain in {name}" for name in REWARDS), "updates", "seconds", "network evaluations")
# What decides the result of the start besides configurations: the source of builders, and packages.
SOURCES = (
    HERE / "easy_vqa_captions.py",
    HERE.parent / "tiny_clip.py",
    *sorted(Path(builders.__file__).parent.glob("*.py")),
)
VERSIONS = ("mmrl", "torch", "transformers", "diffusers", "open_clip_torch", "easy-vqa")


@dataclass(frozen=True)
class Start:
    """The start of reinforcement learning: model folder, evaluation, training log, build results."""

    model: Path
    measured: Measured
    records: Sequence[Mapping[str, Any]]
    built: Mapping[str, Any]


@dataclass
class Spent:
    """Seconds and network evaluations of training, without evaluation and saving.

    A network evaluation is one row through the network, in rollouts, prefix rollouts, references or learning.
    """

    seconds: float = 0.0
    evaluations: int = 0
    log: list[tuple[float, int]] = field(default_factory=list)  # after every step

    def watch(self, run: Run) -> Run:
        """Count from now on, at the end of every step of a run."""
        finish, before = run.finish, run.policy.evaluations

        def counted(*of_step: Any) -> None:
            nonlocal before
            self.seconds += time.perf_counter() - run.report.began
            self.evaluations += run.policy.evaluations - before
            self.log.append((self.seconds, self.evaluations))
            finish(*of_step)  # may evaluate, which does not count
            before = run.policy.evaluations

        run.finish = counted
        return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = demo_parser("image_rl", __doc__, "runs/demo-image", "the three methods")
    options = parser.parse_args(arguments)
    quiet()
    demo(Path(options.output), options.seed, options.overrides)
    return 0


def quiet() -> None:
    """Silence warnings about parts that a pipeline does without, and progress bars."""
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
    """Prepare, train, compare; write `summary.json` and `report.html`, and return the summary.

    `overrides` change the three methods, `start_overrides` the builds and the run `matching`, by their names.
    """
    began = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    start = prepare(output, seed, start_overrides or {})
    trained, figures = {}, []
    for name in METHODS:
        shutil.rmtree(output / name, ignore_errors=True)
        run, spent = begin(name, output, seed, start.model, overrides)
        trained[name] = compared(train(run), start.measured, run.config.max_steps, spent)
        figures += visualizations(name, run)
    return report(output, seed, start, trained, figures, time.perf_counter() - began)


def begin(
    name: str,
    output: Path,
    seed: int,
    start: Path,
    overrides: Sequence[str],
    shared: Path | None = None,
) -> tuple[Run, Spent]:
    """Make the run of a method from the weights in `start`, and count what it spends.

    Prompts and the reward model are in `shared`, by default in `output`.
    """
    spent, paths = Spent(), [f"policy.model={start}", *input_paths(shared or output)]
    return spent.watch(make(str(HERE / f"{name}.yaml"), output / name, seed, [*overrides, *paths])), spent


def input_paths(output: Path, keys: Sequence[str] = ("data", "evaluation.data")) -> list[str]:
    """Set the paths of prompts and of the reward model."""
    prompts = [f"{key}.path={output / 'images' / 'prompts.jsonl'}" for key in keys]
    return prompts + [f"{key.replace('data', 'rewards.0.model')}={output / 'judge'}" for key in keys]


# ---- before reinforcement learning


def prepare(output: Path, seed: int, changes: Mapping[str, Sequence[str]]) -> Start:
    """Build images, reward model and flow model, and train the flow on the images, unless that is cached."""
    images, cache = output / "images", output / "start.json"
    paths = {
        "images": [],
        "judge": [f"build.{split}={images / split}.jsonl" for split in ("train", "test")]
        + [f"build.root={images}"],
        "model": [f"build.texts={images / 'prompts.jsonl'}"],
        "matching": [
            f"policy.model={output / 'model'}",
            f"data.path={images / 'train.jsonl'}",
            f"data.root={images}",
            *input_paths(output, ["evaluation.data"]),
        ],
    }
    overrides = {name: [*changes.get(name, ()), *values] for name, values in paths.items()}
    key = fingerprint(overrides, seed)
    known = json.loads(cache.read_text()) if cache.exists() else {}
    matching = str(HERE / "matching.yaml")
    if known.get("key") == key and Path(known["model"]).is_dir():
        from mmrl.build import load_evaluator

        print(f"{output}: going on from {known['model']}; delete {cache} to train it anew", flush=True)
        options = [*overrides["matching"], f"seed={seed}", f"policy.model={known['model']}"]
        measured = load_evaluator(load(matching, options, Config)).measure()
        return Start(Path(known["model"]), measured, Journal(output / "matching").read(), known["built"])
    cache.unlink(missing_ok=True)
    for name in overrides:
        shutil.rmtree(output / name, ignore_errors=True)
    built = {name: build(str(HERE / f"{name}.yaml"), output / name, seed, overrides[name]) for name in BUILT}
    trained = train(make(matching, output / "matching", seed, overrides["matching"]))
    cache.write_text(json.dumps({"key": key, "model": str(trained.model), "built": built}, indent=2) + "\n")
    return Start(trained.model, trained.measured, trained.records, built)


def fingerprint(overrides: Mapping[str, Sequence[str]], seed: int) -> str:
    """Hash what the start depends on: configurations, seed, the source of builders, versions of packages."""
    raw = {name: read(str(HERE / f"{name}.yaml"), changes) for name, changes in overrides.items()}
    sources = [path.read_text() for path in SOURCES]
    versions = {name: version(name) for name in VERSIONS}
    content = json.dumps([raw, seed, sources, versions], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def version(package: str) -> str:
    """Get the installed version of a package, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# ---- report


def compared(trained: Trained, start: Measured, updates: int, spent: Spent) -> Trained:
    """Add the gain over the start and the cost of training to the metrics of an evaluation."""
    metrics, intervals = dict(trained.measured.metrics), dict(trained.measured.intervals)
    for name in REWARDS:
        metrics[f"gain in {name}"], intervals[f"gain in {name}"] = gain(
            start.table, trained.measured.table, name
        )
    metrics |= {"updates": updates, "seconds": round(spent.seconds), "network evaluations": spent.evaluations}
    measured = dataclasses.replace(trained.measured, metrics=metrics, intervals=intervals)
    return dataclasses.replace(trained, measured=measured)


def gain(before: RewardTable, after: RewardTable, name: str) -> tuple[float, tuple[float, float]]:
    """Average the change of a reward row by row, with a 95 % bootstrap interval over prompts.

    The two tables have the same prompts and the same noise in each row, so this is a paired comparison, and
    its interval is narrower than those of both.
    """
    change = after.at_end(name) - before.at_end(name)
    number = {uid: i for i, uid in enumerate(dict.fromkeys(before.uids))}
    group = torch.tensor([number[uid] for uid in before.uids])
    means = torch.stack([change[group == i].nanmean() for i in range(len(number))])
    samples = torch.randint(len(means), (1000, len(means)), generator=torch.Generator().manual_seed(0))
    ends = means[samples].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=means.dtype))
    return float(change.nanmean()), tuple(ends.tolist())


def visualizations(name: str, run: Run, num_prompts: int = 12) -> list[str]:
    """Draw rollouts of a method's own engine by its own visualizations, if it wraps the denoising engine."""
    from mmrl.training.score import score

    if len(run.config.rollout.engine) < 2:
        return []
    rollouts = run.method.engine.rollout(list(run.evaluator.data)[:num_prompts])
    measured = Measured({}, {}, rollouts, score(run.method.rewards, rollouts))
    return [visualization({name: measured}) for visualization in run.report.pieces.visualizations]


def report(
    output: Path,
    seed: int,
    start: Start,
    trained: Mapping[str, Trained],
    figures: Sequence[str],
    seconds: float,
) -> dict[str, Any]:
    """Print the table, and write the summary and the page."""
    from mmrl.reporting.html import curves, metric_table

    measured = {"start": start.measured, **{name: result.measured for name, result in trained.items()}}
    # Every method configures the same grid; the first method's draws it for all.
    grids = [visualization(measured) for visualization in trained[METHODS[0]].visualizations]
    note = (
        "A small Stable Diffusion 3 on pixels, trained on captioned images, before and after reinforcement "
        "learning. The reward is clip_score, of a small CLIP trained on the same images; coloured_shape "
        f"reads colour and shape by rule and was never trained on. Seed {seed}."
    )
    sections = [
        "<h1>Drawing what is asked for</h1>",
        f"<p class=note>{note}</p>",
        "<h2>Held out</h2>",
        metric_table(measured),
        *grids,
        *figures,
        "<h2>Reinforcement learning</h2><div class=grid>",
        *curves({name: result.records for name, result in trained.items()}),
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
