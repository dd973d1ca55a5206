"""A run: the pieces of a configuration, and the state that has to survive a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl import doctor
from mmrl.config.binding import Bound, Pieces
from mmrl.config.registry import Needs
from mmrl.config.schema import Config
from mmrl.core.protocols import Engine, Observer, Policy, Sampler, Telling
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Rollouts
from mmrl.diagnostics.context import cheapened
from mmrl.reporting.console import Console
from mmrl.reporting.metrics import (
    EXHIBITS,
    Journal,
    Meter,
    Trackers,
    describe_lengths,
    describe_measured,
    describe_rewards,
    describe_shares,
    describe_speed,
    noted_sums,
    pictured,
    write_completions,
    write_measured,
)
from mmrl.reporting.rollout_mismatch import conclude, spell_gap
from mmrl.runtime.distributed import Processes
from mmrl.training import checkpointing
from mmrl.training.collect import Collection
from mmrl.training.evaluate import Evaluator
from mmrl.training.nonfinite import Guard, through_chain
from mmrl.training.reward_coverage import Applied

if TYPE_CHECKING:
    from mmrl.references import Reference


@dataclass
class Run:
    """Everything the loops see. What a method is, they do not."""

    config: Config
    pieces: Pieces
    stream: Stream
    processes: Processes
    policy: Policy
    optimizer: torch.optim.Optimizer
    references: Mapping[str, Reference]
    sampler: Sampler
    engine: Engine
    rewards: Sequence[Bound]
    group_filter: Bound
    chain: Sequence[Bound]
    objective: Any
    metrics: Sequence[Bound]
    learning_rate: Bound | float
    visualizations: Sequence[Bound]
    alarms: Sequence[Bound]
    checkups: Sequence[Bound]
    evaluator: Evaluator | None
    trackers: Trackers = field(default_factory=Trackers)
    quiet: bool = False
    begun: str = ""  # the name of all weights before they were spread over several processes
    meter: Meter = field(default_factory=Meter)
    times: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    guard: Guard = field(default_factory=Guard)
    best: checkpointing.Best = field(default_factory=checkpointing.Best)
    learned: Rollouts = ()  # the rows of the step table
    saved: int = 0  # the step of the last checkpoint
    inputs: dict[str, str] = field(default_factory=dict)  # what the run learns from, by content
    final: Measured | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.num_prompts, self.num_generations = config.rollout.num_prompts, config.rollout.num_generations
        self.max_rounds, self.max_steps = config.rollout.max_rounds, config.max_steps
        self.num_iterations, self.minibatches = config.learn.num_iterations, config.learn.minibatches
        self.micro_batch_steps = config.learn.micro_batch_steps
        self.folder = Path(config.output_dir)
        self.needs: Needs = self.objective.needs
        self.pieces.made["rewards"] = Applied(self.rewards, len(self.pieces.made["data"]))
        self.chain_notes = frozenset().union(*(bound.needs.notes for bound in self.chain))
        self.journal = Journal(self.folder)
        self.warnings = Journal(self.folder, "warnings.jsonl")
        self.records: list[dict[str, Any]] = []  # the journal of this run, as alarms read it
        self.cheap = ", ".join(cheapened(config))  # what makes rollouts cheaper than the policy
        self.raised: list[str] = []  # what alarms and the doctor said, each once
        self.untouched: list[str] | None = None  # trained parameters without gradient in the first update
        self.console = Console(self.folder.name, self.max_steps, self.quiet or not self.processes.main)
        self.trained = [p for p in self.policy.module.parameters() if p.requires_grad]

    # ---- what the loops call

    @property
    def observers(self) -> list[Observer]:
        """List the pieces that see every round."""
        return [thing for thing in self.pieces.made.values() if isinstance(thing, Observer)]

    @property
    def others(self) -> dict[str, Policy]:
        """Name the policies to ask about a batch.

        `old` is asked when the weights will have moved before the last update of a collection, when another
        policy rolled out, or when a piece names it or the engine's own log-probabilities. Otherwise it is the
        current pass, detached.
        """
        asked: dict[str, Policy] = {
            name: self.references[name] for name in self.needs.others if name in self.references
        }
        moved = self.num_iterations * self.minibatches > 1 or self.config.rollout.policy
        if moved or {"old", "engine"} & set(self.needs.others):
            asked["old"] = self.references.get(self.config.rollout.policy, self.policy)
        return asked

    def acting(self) -> AbstractContextManager:
        """Let the policy that rolls out act."""
        name = self.config.rollout.policy
        return self.references[name].acting() if name else nullcontext()

    def advantage(self, table: RewardTable) -> RewardTable:
        """Send a reward table through the chain."""
        return through_chain(self.chain, table, self.stream.step)

    def tick(self, step: int) -> None:
        """Begin a step: random streams move on, schedules take their value."""
        self.began = time.perf_counter()
        self.times = {}
        self.stream.step = step
        clock = Clock(step, self.reported)
        self.pieces.tick(clock)
        rate = self.learning_rate(clock) if callable(self.learning_rate) else self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a share of the step."""
        began = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began

    def backward(self, loss: Tensor, metrics: Mapping[str, Tensor], counts: float) -> None:
        """Back-propagate a micro-batch and note its metrics."""
        self.processes.backward(loss)
        self.meter.add({"loss": loss, **metrics}, counts)

    def step_optimizer(self) -> None:
        """Clip, step, zero, and let moving averages follow."""
        norm = self.processes.clip(self.trained, self.config.learn.max_grad_norm)
        self._look_at_gradients()
        if not self.guard.passes(self, norm):
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for reference in self.references.values():
            reference.move()
        self.meter.add({"grad_norm": torch.tensor(norm)}, 1.0)
        self.meter.updates += 1

    def _look_at_gradients(self) -> None:
        if self.untouched is None:
            named = self.policy.module.named_parameters()
            self.untouched = [name for name, p in named if p.requires_grad and p.grad is None]

    # ---- the end of every step

    def finish(self, step: int, collection: Collection, credit: RewardTable) -> None:
        """Report a step; evaluate and save where it is time."""
        self.guard.part, self.guard.suspects, self.guard.written = None, [], 0
        if step == 0:
            self._examine(collection, credit)
        metrics = self._describe(collection, credit)
        if self.evaluator and self.config.eval_steps and (step + 1) % self.config.eval_steps == 0:
            metrics |= self._evaluate()
        metrics |= {f"time/{name}": seconds for name, seconds in self.times.items()}
        metrics["step_time"] = time.perf_counter() - self.began
        metrics |= describe_speed(collection.seen, metrics["step_time"] - self.times.get("evaluate", 0.0))
        self.reported = metrics
        if (step + 1) % self.config.report.logging_steps == 0 or step + 1 == self.max_steps:
            self._log(step, metrics)
        if self.config.report.log_completions:
            self._write_completions(step, collection, credit)
        if (step + 1) % self.config.save_steps == 0 or step + 1 == self.max_steps:
            self.save(step + 1)

    def _describe(self, collection: Collection, credit: RewardTable) -> dict[str, float]:
        # A process without rows keeps one that is blanked; it is not part of the collection.
        mine = collection.rollouts[: int(collection.table.mine.sum())]
        told = [thing.tell() for thing in self.pieces.made.values() if isinstance(thing, Telling)]
        numbers = {name: value for one in (self.meter.take(), *told) for name, value in one.items()}
        shared = conclude(self.processes.means(numbers))
        entropy = self.processes.means(noted_sums(mine, "entropy"))
        if entropy["steps"]:
            shared["entropy"] = entropy["sum"] / entropy["steps"]
        seen = collection.seen
        rewards = describe_rewards(seen) | describe_shares(collection.table, credit)
        metrics = {**rewards, **describe_lengths(seen), **dict(sorted(shared.items()))}
        if len(collection.table) < len(seen):
            metrics["frac_groups_kept"] = len(set(collection.table.group.tolist())) / len(
                set(seen.group.tolist())
            )
        for metric in self.metrics:
            metrics |= metric(seen)
        if self.guard.skipped:
            metrics["skipped_updates"] = float(self.guard.skipped)
        return {**metrics, "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _examine(self, collection: Collection, credit: RewardTable) -> None:
        """Let the doctor look at the first step, as far as that costs nothing."""
        if not self.processes.main:
            return
        for symptom in doctor.glance(self, collection, credit):
            self.warn(symptom.text, by="doctor")

    def warn(self, text: str, by: str = "") -> None:
        """Say what the owner should know, once, on the console and at the head of the report."""
        if text not in self.raised:
            self.raised.append(text)
            if self.processes.main:
                self.warnings.write({"step": self.stream.step, "by": by, "text": text})
            self.console.warn(text)

    def _evaluate(self) -> dict[str, float]:
        with self.timing("evaluate"):
            return describe_measured(self._measure())

    def _measure(self) -> Measured:
        measured = self.evaluator.measure()
        for said in measured.table.absent.values():
            self.warn(f"evaluation: {said}")
        return measured

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.processes.main:
            self.records.append(self.heard(self.journal.write({"step": step, **metrics})))
            self.trackers.write(metrics, step)
            if len(self.records) == 1 and (said := spell_gap(metrics, self.cheap)):
                self.console.say(said)
            self._listen()
        self.console.step(step, metrics)

    def heard(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Give a line of the journal as alarms read it, with what makes rollouts cheap."""
        return {**record, "cheap": self.cheap}

    def _listen(self, last: Measured | None = None) -> None:
        """Let the alarms read the journal, with the last evaluation in it, and say what is new."""
        records = list(self.records)
        if last and records:
            records[-1] = {**describe_measured(last), **records[-1]}  # what was measured there stays
        for alarm in self.alarms:
            for text in alarm(records):
                self.warn(text)

    def _write_completions(self, step: int, collection: Collection, credit: RewardTable) -> None:
        mine = credit.select(credit.mine)
        rows = collection.rollouts[: len(mine)]
        if rows:
            advantage = mine.values[:, 0].gather(1, mine.last.clamp(min=0)[:, None])[:, 0].tolist()
            part = f"-{self.processes.rank}" if self.processes.world > 1 else ""
            path = self.folder / "completions" / f"completions_{step:06d}{part}.parquet"
            pictures = pictured(step, self.max_steps, self.config.report.media_log_steps)
            table = collection.table.select(collection.table.mine)
            write_completions(path, rows, table, advantage, pictures=pictures)

    # ---- stop and go on

    def save(self, step: int) -> None:
        """Write `checkpoint-{step}`."""
        checkpointing.save(self, step)

    def resume(self) -> int:
        """Take up the last whole checkpoint, and give the step to go on with."""
        return checkpointing.resume(self)

    def leave(self, step: int, why: str) -> None:
        """Stop in good order before the end: the step is saved, and the same command goes on."""
        if self.saved != step:
            self.save(step)
        self.console.end()
        if self.processes.main:
            self.trackers.close()
        self.console.say(f"stopped by {why or 'another process'} behind step {step}, which is saved")

    def close(self) -> None:
        """Evaluate once more, write the page to look at, and leave the terminal as it was."""
        self.console.end()
        last = self._measure() if self.evaluator else None
        if self.processes.main:
            from mmrl.reporting.html import write_page

            self._listen(last)
            if last:
                write_measured(self.folder, last)
                if fragments := "".join(piece({"answer": last}) for piece in self.visualizations):
                    (self.folder / EXHIBITS).write_text(fragments)
            self.console.say(f"report: {write_page(self.folder)}")
            self.trackers.close()
            checkpointing.hand_over(self, describe_measured(last) if last else {})
        self.final = last
