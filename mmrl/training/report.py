"""Reports of a training run: metrics, warnings, completions, and the final page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.binding import Bound
from mmrl.config.schema import Config, as_plain
from mmrl.core.episodes import join_episodes
from mmrl.core.reward_table import Collection, Measured, RewardTable
from mmrl.core.rng import Stream
from mmrl.diagnostics.context import lossy_pieces
from mmrl.diagnostics.waiting import advise_asking_ahead, could_ask_ahead
from mmrl.reporting.answers import (
    drop_predictions,
    keeps_images,
    step_file,
    write_completions,
    write_predictions,
)
from mmrl.reporting.console import Console
from mmrl.reporting.metrics import (
    VISUALIZATIONS,
    Journal,
    Trackers,
    describe_ages,
    describe_lengths,
    describe_measured,
    describe_rewards,
    describe_shares,
    describe_speed,
    noted_ages,
    noted_sums,
    of_training,
    steps_taken,
    write_measured,
)
from mmrl.reporting.rollout_mismatch import conclude, describe_mismatch
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import write_whole
from mmrl.runtime.machine import EnergyMeter

IMAGES = 64  # number of prompts of an evaluation that are stored with thumbnails


@dataclass(frozen=True)
class ReportPieces:
    """The pieces that observe a run without influencing its results."""

    metrics: Sequence[Bound] = ()
    visualizations: Sequence[Bound] = ()
    checks: Sequence[Bound] = ()  # watch the metrics of every step
    startup_checks: Sequence[Bound] = ()  # run once, after the first step
    trackers: Trackers = field(default_factory=Trackers)


class Reporter:
    """Writer of a run's journal, warnings, completions and page; also times its steps."""

    def __init__(
        self, config: Config, processes: Processes, stream: Stream, pieces: ReportPieces, quiet: bool = False
    ) -> None:
        self.config, self.processes, self.stream, self.pieces = config, processes, stream, pieces
        self.cheap = ", ".join(lossy_pieces(config))  # pieces that make rollouts inexact (quantized caches)
        self.could_ask_ahead = could_ask_ahead(config)
        self.journal = Journal(Path(config.output_dir))
        self.warnings = Journal(self.folder, "warnings.jsonl")
        self.console = Console(self.folder.name, config.max_steps, quiet or not processes.main)
        self.records: list[dict[str, Any]] = []  # lines of metrics so far, for the checks
        self.raised: list[str] = []  # the distinct texts of warnings
        self.evaluated_at = -1  # number of steps before the last printed evaluation
        self.times: dict[str, float] = {}  # maps activities to their seconds in this step
        self.began, self.energy = 0.0, EnergyMeter()

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.journal.path.parent

    def begin(self, start: int) -> None:
        """Start or resume at a step: drop later lines of the journals and open the trackers."""
        if self.processes.main:
            self.journal.rewind(start)  # steps after the checkpoint are repeated
            self.records = [{**record, "cheap": self.cheap} for record in self.journal.read()]
            self.warnings.rewind(start)
            drop_predictions(self.folder, start)
            self.raised = [record["text"] for record in self.warnings.read()]
            self.pieces.trackers.open(self.folder, as_plain(self.config), start, self.console.say)
        self.console.begin(start, next(iter(of_training(self.records)), None))

    def tick(self) -> None:
        """Start the timer of a step."""
        self.began, self.times = time.perf_counter(), {}
        self.energy.read()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Measure the seconds inside this context and add them to an activity of the step."""
        began = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def warn(self, text: str, by: str = "") -> None:
        """Show a warning on the console and on the page, unless the same text was shown before."""
        if text not in self.raised:
            self.raised.append(text)
            if self.processes.main:
                self.warnings.write({"step": self.stream.step, "by": by, "text": text})
            self.console.warn(text)

    def describe(
        self, collection: Collection, credit: RewardTable, numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute the metrics of a step, including the means of `numbers` over processes."""
        shared = conclude(self.processes.means(numbers))  # means first: `conclude` takes ratios
        entropy = self.processes.means(noted_sums(collection.rollouts, "entropy"))
        if entropy["steps"]:
            shared["entropy"] = entropy["sum"] / entropy["steps"]
        seen, table = collection.seen, collection.table
        if self.config.rollout.max_staleness:
            counts = self.processes.all_gather_object(noted_ages(collection.rollouts, self.stream.step))
            shared |= describe_ages(counts)
        rewards = describe_rewards(seen) | describe_shares(table, credit)
        metrics = {**rewards, **describe_lengths(seen), **dict(sorted(shared.items()))}
        if len(table) < len(seen):
            metrics["frac_groups_kept"] = len(set(table.group.tolist())) / len(set(seen.group.tolist()))
        for metric in self.pieces.metrics:
            metrics |= metric(join_episodes(seen))
        return metrics

    def durations(self, collection: Collection) -> dict[str, float]:
        """Return the seconds of the step and its activities, the throughput, and joules if metered."""
        metrics = self.energy.read() | {f"time/{name}": seconds for name, seconds in self.times.items()}
        metrics["step_time"] = time.perf_counter() - self.began
        trained = metrics["step_time"] - self.times.get("evaluate", 0.0)
        return metrics | describe_speed(collection.seen, trained)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics to the journal and the trackers, and run the checks."""
        if self.processes.main:
            self.records.append({**self.journal.write({"step": step, **metrics}), "cheap": self.cheap})
            self.pieces.trackers.write(metrics, step)
            steps = of_training(self.records)
            if len(steps) == 1 and (sentence := describe_mismatch(metrics, self.cheap)):
                self.console.say(sentence)
            if self.could_ask_ahead and (sentence := advise_asking_ahead(steps)):
                self.console.say(sentence)
            self._run_checks(self.records)  # over all steps so far; repeated warnings show once
        self.console.step(step, metrics)

    def log_start(self, measured: Measured) -> None:
        """Write the evaluation before the first step to the journal, as a separate line with step 0."""
        metrics = describe_measured(measured)
        if self.processes.main:
            self.records.append({**self.journal.write({"step": 0, **metrics}), "cheap": self.cheap})
            self.pieces.trackers.write(metrics, 0)

    def evaluated(self, step: int, measured: Measured) -> None:
        """Print an evaluation's metrics next to those of the first evaluation, and write its predictions."""
        for sentence in measured.table.absent.values():
            self.warn(f"evaluation: {sentence}")
        if self.config.report.log_completions:
            with self.processes.fail_together("writing predictions"):
                path, world = step_file(self.folder, step), self.processes.world
                write_predictions(path, measured, world=world, images=IMAGES)
        if step != self.evaluated_at:  # the final evaluation may already be printed
            words = [self._beside_first(name, measured) for name in measured.intervals]
            self.console.say(f"evaluation at step {step}: " + ";  ".join(words))
        self.evaluated_at = step

    def first_value(self, name: str) -> tuple[int, float] | None:
        """Return a metric's value in the first evaluation of the journal, and the step of that evaluation."""
        for record in self.records:
            if (key := f"eval_{name}") in record:
                return steps_taken(record), record[key]
        return None

    def _beside_first(self, name: str, measured: Measured) -> str:
        low, high = measured.intervals[name]
        spread = f"{low:.4g} to {high:.4g}" if low < high else "the same for every prompt"
        words = f"{name} {measured.metrics[name]:.4g} ({spread})"
        match self.first_value(name):
            case (step, value):
                words += f", {value:.4g} at {f'step {step}' if step else 'the start'}"
        return words

    def _run_checks(self, records: Sequence[Mapping[str, Any]]) -> None:
        for check in self.pieces.checks:
            for finding in check(list(records)):
                self.warn(finding.text)

    def write_completions(self, step: int, collection: Collection, credit: RewardTable) -> None:
        """Write the rollouts of this process with their rewards and advantages to a parquet file."""
        if not collection.rollouts:
            return
        mine = credit.select(credit.mine)
        advantage = mine.values[:, 0].gather(1, mine.last.clamp(min=0)[:, None])[:, 0].tolist()
        part = f"-{self.processes.rank}" if self.processes.world > 1 else ""
        path = self.folder / "completions" / f"completions_{step:06d}{part}.parquet"
        images = keeps_images(step, self.config.max_steps, self.config.report.media_log_steps)
        write_completions(path, collection.rollouts, collection.table, advantage, images=images)

    def leave(self, step: int, why: str) -> None:
        """Print that a signal stopped the run early, and close the trackers."""
        self.console.end()
        if self.processes.main:
            self.pieces.trackers.close()
        self.console.say(f"stopped by {why or 'another process'} after step {step}, which is saved")

    def close(self, last: Measured | None) -> None:
        """Write the final evaluation, its visualizations and the HTML page; main process only."""
        from mmrl.reporting.html import write_page

        records = list(self.records)
        if last and records:  # metrics that the last step reported take precedence
            records[-1] = {**describe_measured(last), **records[-1]}
        self._run_checks(records)  # including the last evaluation
        if last:
            write_measured(self.folder, last)
            if fragments := "".join(piece({"answer": last}) for piece in self.pieces.visualizations):
                write_whole(self.folder / VISUALIZATIONS, fragments)
        self.console.say(f"report: {write_page(self.folder)}")
        self.pieces.trackers.close()
