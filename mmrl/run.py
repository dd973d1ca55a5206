"""A run: the pieces of a configuration, and the state that has to survive a stop."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl import checkpoint
from mmrl.bind import Bound, Pieces
from mmrl.collect import Collection
from mmrl.config import Config, ConfigError, as_plain, read, write
from mmrl.distributed import Processes
from mmrl.draws import Stream
from mmrl.evaluate import Evaluator
from mmrl.protocols import Engine, Observer, Policy, Sampler, Stateful
from mmrl.registry import Needs
from mmrl.report import (
    Console,
    Journal,
    Meter,
    Trackers,
    describe_lengths,
    describe_measured,
    describe_rewards,
    noted_sums,
    write_completions,
)
from mmrl.table import Measured, RewardTable
from mmrl.types import Clock

if TYPE_CHECKING:
    from mmrl.references import Reference


class NotFinite(FloatingPointError):
    """A loss or gradient that is not a number. The step was not taken."""


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
    exhibits: Sequence[Bound]
    alarms: Sequence[Bound]
    evaluator: Evaluator | None
    quiet: bool = False
    meter: Meter = field(default_factory=Meter)
    times: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.num_prompts, self.num_generations = config.rollout.num_prompts, config.rollout.num_generations
        self.max_rounds, self.max_steps = config.rollout.max_rounds, config.max_steps
        self.num_iterations, self.minibatches = config.learn.num_iterations, config.learn.minibatches
        self.micro_batch_steps = config.learn.micro_batch_steps
        self.folder = Path(config.output_dir)
        self.needs: Needs = self.objective.needs
        self.chain_notes = frozenset().union(*(bound.needs.notes for bound in self.chain))
        self.journal = Journal(self.folder)
        self.records: list[dict[str, Any]] = []  # the journal of this run, as alarms read it
        self.raised: list[str] = []  # what alarms said, each once
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
        for piece in self.chain:
            table = piece(table)
        return table

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
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NotFinite(
                f"the gradient of step {self.stream.step} has the norm {norm}; the step was not taken. Lower"
                " learn.learning_rate or learn.max_grad_norm, or look at the rewards of this step"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for reference in self.references.values():
            reference.move()
        self.meter.add({"grad_norm": torch.tensor(norm)}, 1.0)
        self.meter.updates += 1

    # ---- the end of every step

    def finish(self, step: int, collection: Collection, credit: RewardTable) -> None:
        """Report a step; evaluate and save where it is time."""
        metrics = self._describe(collection)
        if self.evaluator and self.config.eval_steps and (step + 1) % self.config.eval_steps == 0:
            metrics |= self._evaluate()
        metrics |= {f"time/{name}": seconds for name, seconds in self.times.items()}
        metrics["step_time"] = time.perf_counter() - self.began
        self.reported = metrics
        if (step + 1) % self.config.report.logging_steps == 0 or step + 1 == self.max_steps:
            self._log(step, metrics)
        if self.config.report.log_completions:
            self._write_completions(step, collection, credit)
        if (step + 1) % self.config.save_steps == 0 or step + 1 == self.max_steps:
            self.save(step + 1)

    def _describe(self, collection: Collection) -> dict[str, float]:
        # A process without rows keeps one that is blanked; it is not part of the collection.
        mine = collection.rollouts[: int(collection.table.mine.sum())]
        shared = self.processes.means(self.meter.take())
        entropy = self.processes.means(noted_sums(mine, "entropy"))
        if entropy["steps"]:
            shared["entropy"] = entropy["sum"] / entropy["steps"]
        seen = collection.seen
        metrics = {**describe_rewards(seen), **describe_lengths(seen), **dict(sorted(shared.items()))}
        if len(collection.table) < len(seen):
            metrics["frac_groups_kept"] = len(set(collection.table.group.tolist())) / len(
                set(seen.group.tolist())
            )
        for metric in self.metrics:
            metrics |= metric(seen)
        return {**metrics, "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _evaluate(self) -> dict[str, float]:
        with self.timing("evaluate"):
            return describe_measured(self.evaluator.measure())

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.processes.main:
            self.journal.write({"step": step, **metrics})
            self.trackers.write(metrics, step)
            self.records.append({"step": step, **metrics})
            self._listen()
        self.console.step(step, metrics)

    def _listen(self, last: Measured | None = None) -> None:
        """Let the alarms read the journal, with the last evaluation in it, and say what is new."""
        records = list(self.records)
        if last and records:
            records[-1] = {**describe_measured(last), **records[-1]}  # what was measured there stays
        for alarm in self.alarms:
            for text in alarm(records):
                if text not in self.raised:
                    self.raised.append(text)
                    self.console.say(f"warning: {text}")

    def _write_completions(self, step: int, collection: Collection, credit: RewardTable) -> None:
        mine = credit.select(credit.mine)
        rows = collection.rollouts[: len(mine)]
        if rows:
            advantage = mine.values[:, 0].gather(1, mine.last.clamp(min=0)[:, None])[:, 0].tolist()
            part = f"-{self.processes.rank}" if self.processes.world > 1 else ""
            path = self.folder / "completions" / f"completions_{step:06d}{part}.parquet"
            write_completions(path, rows, collection.table.select(collection.table.mine), advantage)

    # ---- stop and go on

    def save(self, step: int) -> None:
        """Write `checkpoint-{step}`: a model folder that its library reads, and the state that makes the run
        go on exactly."""
        folder = self.folder / f"checkpoint-{step}"
        beside = self.folder / f"checkpoint-{step}.tmp"
        if self.processes.main:
            shutil.rmtree(beside, ignore_errors=True)
            self.policy.save(beside / checkpoint.MODEL)
            checkpoint.write_state(beside, self._state(step))
            checkpoint.publish(beside, folder)
            checkpoint.prune(self.folder, self.config.save_total_limit, step)
        self.processes.wait()

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "reported": self.reported,
            "optimizer": self.optimizer.state_dict(),
            "references": {name: reference.state_dict() for name, reference in self.references.items()},
            "pieces": {place: thing.state_dict() for place, thing in self._stateful().items()},
        }

    def _stateful(self) -> dict[str, Stateful]:
        return {
            place: thing
            for place, thing in self.pieces.made.items()
            if isinstance(thing, Stateful) and not place.startswith("references.")
        }

    def resume(self) -> int:
        """Prepare the output folder, take up the last whole checkpoint in it, and give the step to go on
        with."""
        self._open_folder()
        start = 0
        for folder in checkpoint.checkpoints(self.folder):
            try:
                state = checkpoint.read_state(folder)
            except checkpoint.CheckpointError as error:
                self.console.say(f"{error}; looking at the one before")
                continue
            self.policy.load(folder / checkpoint.MODEL)
            self.optimizer.load_state_dict(state["optimizer"])
            for name, reference in self.references.items():
                reference.load_state_dict(state["references"][name])
            for place, thing in self._stateful().items():
                thing.load_state_dict(state["pieces"][place])
            self.reported, start = state["reported"], state["step"]
            self.console.say(f"going on from {folder}")
            break
        if self.processes.main:
            self.journal.rewind(start)
            self.records = self.journal.read()
        self.trackers = Trackers(
            self.config.report.trackers if self.processes.main else (), self.folder, self.console.say
        )
        self.console.begin(start)
        return start

    def _open_folder(self) -> None:
        written = self.folder / "config.yaml"
        if self.processes.main:
            if self.config.overwrite_output_dir and self.folder.exists():
                if any(self.folder.iterdir()) and not written.exists():
                    raise ConfigError(
                        f"'{self.folder}' holds files but no run (it has no config.yaml), so it is not "
                        "overwritten; name another output_dir"
                    )
                shutil.rmtree(self.folder)
            if written.exists() and _essence(read(written)) != _essence(as_plain(self.config)):
                raise ConfigError(
                    f"'{self.folder}' holds a run with another configuration (see its config.yaml); name "
                    "another output_dir, or set overwrite_output_dir=true to throw that run away"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.config, written)
        self.processes.wait()

    def close(self) -> None:
        """Evaluate once more, write the page to look at, and leave the terminal as it was."""
        self.console.end()
        last = self.evaluator.measure() if self.evaluator else None
        if self.processes.main:
            from mmrl.page import write_page

            fragments = [piece({"answer": last}) for piece in self.exhibits] if last else []
            self._listen(last)
            path = write_page(self.folder, self.journal.read(), last, fragments, self.raised)
            self.console.say(f"report: {path}")
            self.trackers.close()
        self.final = last


def _essence(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what may change between a run and its continuation."""
    return {
        k: v
        for k, v in raw.items()
        if k
        not in ("max_steps", "save_steps", "save_total_limit", "report", "overwrite_output_dir", "output_dir")
    }
