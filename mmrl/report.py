"""Numbers of a step, under the names that TRL uses, and where they go: console, JSON lines, trackers,
parquet."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.table import Measured, RewardTable, name_id
from mmrl.tensor import group_extreme, group_index
from mmrl.types import Rollouts


def describe_rewards(table: RewardTable) -> dict[str, float]:
    """Compute the reward metrics of a collection, over the rows that the policy sampled itself where there
    are any."""
    sampled = table.ids["on_policy"][:, 0] == 1
    table = table.select(sampled) if sampled.any() else table
    # Groups with a faulty reward are valid nowhere; the rest of their rewards is no sum.
    reward = torch.where(table.valid.any(1).any(-1), table.reward(), torch.nan)
    known = ~reward.isnan()
    index = group_index([table.group])
    extent = group_extreme(reward, index, known) - group_extreme(reward, index, known, largest=False)
    metrics = {
        "reward": _mean(reward),
        "reward_std": _std(reward),
        "frac_reward_zero_std": float((extent[known] < 1e-8).double().mean()) if known.any() else math.nan,
    }
    for name in table.scored:
        answers = table.at_end(name)
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = _mean(answers), _std(answers)
        if f"fault/{name}" in table.ids:
            broken = table.ids[f"fault/{name}"][table.present].double()
            metrics[f"rewards/{name}/error_rate"] = float(broken.mean())
    return metrics


def describe_lengths(table: RewardTable) -> dict[str, float]:
    """Compute the length metrics of a collection; a row is clipped when its answer carries the tag `finish:
    length`."""
    sampled = table.ids["on_policy"][:, 0] == 1
    table = table.select(sampled) if sampled.any() else table
    length = table.length.double()
    metrics = {
        f"completions/{name}_length": float(value)
        for name, value in (("mean", length.mean()), ("min", length.min()), ("max", length.max()))
    }
    if "finish" in table.ids:
        clipped = table.ids["finish"].gather(1, table.last.clamp(min=0)[:, None])[:, 0] == name_id("length")
        metrics["completions/clipped_ratio"] = float(clipped.double().mean())
        if not clipped.all():
            metrics["completions/mean_terminated_length"] = float(length[~clipped].mean())
    return metrics


def describe_measured(measured: Measured) -> dict[str, float]:
    """Name what an evaluation found as the journal does: `eval_x`, and `eval_x/low` and `eval_x/high` where
    its interval ends."""
    ends = {
        f"eval_{name}/{side}": end
        for name, interval in measured.intervals.items()
        for side, end in zip(("low", "high"), interval, strict=True)
    }
    return {f"eval_{name}": value for name, value in measured.metrics.items()} | ends


def noted_sums(rollouts: Rollouts, name: str) -> dict[str, float]:
    """Add up what the engine noted of the steps of sampled rows, and count those steps."""
    noted = [row.notes[name].double() for row in rollouts if name in row.notes and row.on_policy]
    return {"sum": float(sum(note.sum() for note in noted)), "steps": float(sum(map(len, noted)))}


def _mean(values: Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.mean()) if known.numel() else math.nan


def _std(values: Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.std()) if known.numel() > 1 else 0.0


class Meter:
    """Adds up the metrics of micro-batches; they are shares of an update's totals, so sums over micro-batches
    are means."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.updates = 0

    def add(self, metrics: Mapping[str, Tensor], counts: float) -> None:
        """Add the metrics of a micro-batch (`counts` 0 for a repeated one)."""
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + counts * value.detach().double().cpu()

    def take(self) -> dict[str, float]:
        """Give the means over the updates since the last call, and begin again."""
        means = {name: float(value) / max(self.updates, 1) for name, value in self.sums.items()}
        self.sums, self.updates = {}, 0
        return means


class Journal:
    """`metrics.jsonl`: one line a step. A resumed run drops the lines behind its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a number that is none, such as the mean of nothing, is `null`."""
        with self.path.open("a") as file:
            file.write(_line(record))

    def read(self) -> list[dict[str, Any]]:
        """Read all records; a last line cut short by a crash is left out."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            records.append({name: math.nan if value is None else value for name, value in record.items()})
        return records

    def rewind(self, step: int) -> None:
        """Forget everything from `step` on."""
        kept = [record for record in self.read() if record["step"] < step]
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(map(_line, kept)))
        beside.replace(self.path)


def _line(record: Mapping[str, Any]) -> str:
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


PAUSE = 5.0  # seconds between plain lines, where there is no terminal


class Console:
    """Progress with reward and ETA on a terminal, plain lines elsewhere."""

    def __init__(self, title: str, max_steps: int, quiet: bool = False) -> None:
        self.title, self.max_steps, self.quiet = title, max_steps, quiet
        self.progress, self.printed = None, -math.inf

    def begin(self, step: int) -> None:
        """Show where the run stands."""
        if self.quiet or not sys.stdout.isatty():
            return
        from rich import progress

        self.progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[words]}"),
        )
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=self.max_steps, completed=step, words="")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        words = "  ".join(f"{name} {metrics[name]:.3g}" for name in _SHOWN if name in metrics)
        if self.progress is not None:
            self.progress.update(self.task, completed=step + 1, words=words)
        elif not self.quiet and (time.monotonic() > self.printed + PAUSE or step + 1 == self.max_steps):
            self.printed = time.monotonic()
            left = (self.max_steps - step - 1) * metrics.get("step_time", 0.0)
            print(f"{self.title} {step + 1}/{self.max_steps}  {words}  eta {left:.0f} s", flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the progress display."""
        if not self.quiet:
            print(text, flush=True) if self.progress is None else self.progress.console.print(
                text, highlight=False, markup=False, soft_wrap=True
            )

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


_SHOWN = (
    "reward",
    "reward_std",
    "kl",
    "entropy",
    "completions/mean_length",
    "loss",
    "grad_norm",
    "step_time",
)


class Trackers:
    """Passes numbers on to dashboards. One that is not installed is named once."""

    def __init__(self, names: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
        self.writers = []
        for name in names:
            if name != "tensorboard":
                raise ValueError(f"no tracker is called '{name}'; there is tensorboard")
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.writers.append(SummaryWriter(str(folder / "tensorboard")))
            except ImportError:
                say(
                    "tensorboard is not installed, so no curves are written for it; install mmrl[tensorboard]"
                )

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the finite numbers of a step."""
        for writer in self.writers:
            for name, value in metrics.items():
                if math.isfinite(value):
                    writer.add_scalar(name, value, step)
            writer.flush()

    def close(self) -> None:
        """Finish."""
        for writer in self.writers:
            writer.close()


def write_completions(path: Path, rollouts: Rollouts, table: RewardTable, advantage: Sequence[float]) -> None:
    """Write this process's rows with their rewards and advantages as parquet, one row each."""
    import pyarrow
    from pyarrow import parquet

    mine = table.select(table.mine)
    columns: dict[str, list] = {
        "uid": [row.prompt.uid for row in rollouts],
        "prompt": [row.prompt.text for row in rollouts],
        "completion": [row.outcomes[-1].text for row in rollouts],
        "on_policy": [row.on_policy for row in rollouts],
        "length": [row.length for row in rollouts],
        "advantage": list(advantage),
    }
    columns |= {f"reward/{name}": mine.at_end(name).tolist() for name in mine.scored}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
