"""The training run: its pieces and progress, and what happens at the start and the end of a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.config.binding import Pieces
from mmrl.config.loading import nearest
from mmrl.config.schema import Config
from mmrl.core.protocols import (
    AdvantageObserver,
    HasMetrics,
    HeldOut,
    Observer,
    Policy,
    Replay,
    RunCallback,
    Stateful,
)
from mmrl.core.reward_table import Collection, Measured, RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Clock, Prompt, TrainerState
from mmrl.data.row_prompts import ByUid
from mmrl.diagnostics.context import Examined
from mmrl.reporting.metrics import Journal, describe_measured
from mmrl.runtime.content_hash import of_tensors, of_weights
from mmrl.runtime.distributed import Processes
from mmrl.runtime.fsdp import gathered, reshard_state
from mmrl.training.learner import Learner
from mmrl.training.learning_signal import LearningSignal
from mmrl.training.method import Method, through_chain
from mmrl.training.report import Reporter
from mmrl.training.score import RewardLog
from mmrl.training.unreadable import Unreadable


@dataclass
class Best:
    """The checkpoint with the best `metric_for_best_model`; step 0 means none yet."""

    step: int = 0
    value: float = math.nan

    def see(self, step: int, value: float, greater_is_better: bool) -> None:
        """Record a checkpoint if its metric is better than the best so far; on ties keep the earlier one."""
        if math.isfinite(value) and (
            self.step == 0 or (value > self.value if greater_is_better else value < self.value)
        ):
            self.step, self.value = step, value


@dataclass
class Progress:
    """Progress of a run, saved in its checkpoints."""

    step: int = 0  # number of finished steps
    reported: dict[str, float] = field(default_factory=dict)  # metrics of the last step
    best: Best = field(default_factory=Best)
    inputs: dict[str, str] = field(default_factory=dict)  # hashes of prompts, media and frozen weights


@dataclass
class InFlight:
    """A request for the rollouts of a later step, with the weights and clock at the time of the request.

    A checkpoint stores the request instead of the rollouts, and a resumed run repeats it.
    """

    step: int  # the step that learns from the rollouts
    uids: Sequence[str]  # uids of the requested prompts of all processes, in order; empty: none is readable
    weights: Sequence[Tensor]  # trained weights at the request
    clock: Clock
    scheduled: Mapping[str, float]  # values of scheduled options at the request
    requested: bool = True  # False after a resume: must be requested again

    def state_dict(self) -> dict[str, Any]:
        """Return all fields except `requested`."""
        listed = {"uids": list(self.uids), "weights": list(self.weights)}
        return {"step": self.step, **listed, "clock": asdict(self.clock), "scheduled": self.scheduled}

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> InFlight:
        """Create an instance from the output of `state_dict`."""
        clock, scheduled = Clock(**state["clock"]), state["scheduled"]
        return InFlight(state["step"], state["uids"], state["weights"], clock, scheduled, False)


@dataclass
class Run:
    """A training run as the training loop uses it, independent of method and modality."""

    config: Config
    pieces: Pieces
    processes: Processes
    method: Method
    learner: Learner  # the learner of the policy
    report: Reporter
    evaluator: HeldOut | None = None
    seconds: Mapping[str, Learner] = field(default_factory=dict)  # second models by name
    progress: Progress = field(default_factory=Progress)
    log: RewardLog = field(default_factory=RewardLog)  # metrics and columns that rewards log
    signal: LearningSignal = field(init=False)
    final: Measured | None = None  # the evaluation after the last step
    ahead: deque[InFlight] = field(default_factory=deque)  # requested rollouts of the next steps, in order
    unreadable: Unreadable = field(default_factory=Unreadable)  # unreadable prompts of the data
    made_with: Mapping[str, Any] = field(default_factory=dict)  # output of `record_of` and the run's name

    def __post_init__(self) -> None:
        learns = self.config.learn.num_iterations > 0
        stops = learns and self.config.learn.on_no_learning == "stop"
        self.signal = LearningSignal(stops, self.report.warn if learns else lambda text: None)

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.learner.policy

    @property
    def learners(self) -> tuple[Learner, ...]:
        """The learner of the policy, then the learners of additional models."""
        return (self.learner, *self.seconds.values())

    @property
    def stream(self) -> Stream:
        """The random streams of all pieces."""
        return self.pieces.stream

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.config.output_dir)

    @property
    def journal(self) -> Journal:
        """The journal with the metrics of every reported step."""
        return self.report.journal

    @cached_property
    def prompts_by_uid(self) -> Mapping[str, Prompt]:
        """The prompts of the data, keyed by uid."""
        return ByUid(self.pieces.made["data"])

    @property
    def observers(self) -> list[Observer]:
        """The pieces that observe every sampling round."""
        return list(self.pieces.that_are(Observer).values())

    @property
    def replays(self) -> list[Replay]:
        """The pieces that replay rows of earlier steps."""
        return list(self.pieces.that_are(Replay).values())

    @property
    def ended(self) -> bool:
        """Whether a callback has ended the run."""
        return any(callback.ended for callback in self.pieces.that_are(RunCallback).values())

    @property
    def stateful(self) -> dict[str, Mapping[str, Stateful]]:
        """The references, keyed by name, and other pieces with saved state, keyed by configuration key."""
        references = {f"references.{name}" for name in self.method.references}
        others = {k: piece for k, piece in self.pieces.that_are(Stateful).items() if k not in references}
        return {"references": {**self.method.references, **self.seconds}, "pieces": others}

    # ---- called by the training loop

    def notify(self, event: str) -> None:
        """Pass an event to the callbacks; `RunCallback.on_event` lists the events."""
        for callback in self.pieces.that_are(RunCallback).values():
            callback.on_event(event, self.progress.step, self.progress.reported)

    def begin(self, start: int) -> None:
        """Evaluate before the first step if `eval_on_start` is on."""
        if start == 0 and self.evaluator and self.config.eval_on_start:
            self.report.log_start(self._measure(self.evaluator, 0))

    def tick(self, step: int) -> None:
        """Start a step: advance random streams, schedules and learning rates."""
        self.report.tick()
        self.stream.step = step
        learn = self.config.learn
        updates = max(1, learn.num_iterations) * learn.minibatches  # optimizer steps per training step
        self.log.state = TrainerState(step * updates, self.config.max_steps * updates)
        # Schedules may read the metrics of the previous step.
        clock = Clock(step, self.progress.reported, self.config.max_steps)
        self.pieces.tick(clock)
        for learner in self.learners:
            learner.set_learning_rate(clock)

    def rollout_weights(self) -> AbstractContextManager:
        """Use the weights of `rollout.policy` for sampling inside this context."""
        name = self.config.rollout.policy
        return self.method.references[name].rollout_weights() if name else nullcontext()

    def advantage(self, table: RewardTable) -> RewardTable:
        """Turn rewards into advantages with the configured functions, and pass them to the observers."""
        credit = through_chain(self.learner.chain, table, self.stream.step)
        for observer in self.pieces.that_are(AdvantageObserver).values():
            observer.observe_advantages(credit)
        return credit

    def finish(self, step: int, collection: Collection, credit: RewardTable) -> None:
        """Report a finished step, with an evaluation if one is due."""
        config, report = self.config, self.report
        updates = sum(learner.guard.updates for learner in self.learners)
        for learner in self.learners:
            learner.guard.end_step()
        if step == 0 and self.processes.main:
            self._examine(collection, credit)
        sources = [*self.pieces.that_are(HasMetrics).values(), *self.seconds.values()]
        sources = [piece.pop_metrics() for piece in (self.learner, *sources)]
        numbers = {name: value for source in sources for name, value in source.items()}
        metrics = report.describe(collection, credit, numbers)
        if skipped := sum(learner.guard.skipped for learner in self.learners):
            metrics["skipped_updates"] = float(skipped)
        metrics |= self.log.take(self.processes, metrics)
        metrics |= {f"schedule/{place}": value for place, value in self.pieces.scheduled.items()}
        metrics["learning_rate"] = self.learner.optimizer.param_groups[0]["lr"]
        if self.evaluator and config.eval_steps and (step + 1) % config.eval_steps == 0:
            with report.timing("evaluate"):
                metrics |= describe_measured(self._measure(self.evaluator, step + 1))
        metrics |= report.durations(collection)
        metrics["updates"] = float(self.signal.updates + updates)
        self.progress.step, self.progress.reported = step + 1, metrics
        if (step + 1) % config.report.logging_steps == 0 or step + 1 == config.max_steps:
            report.log(step, metrics)
        if config.report.log_completions:
            report.write_completions(step, collection, credit)
        self.signal.see(updates, metrics, scheduled=callable(self.learner.learning_rate))
        self.notify("step_end")

    def _examine(self, collection: Collection, credit: RewardTable) -> None:
        """Apply the startup checks to the first step."""
        method = self.method
        examined = Examined(
            config=self.config,
            policy=self.policy,
            engine=method.engine,
            rewards=method.rewards,
            needs=self.learner.needs,
            rollouts=collection.rollouts,
            table=collection.seen,
            credit=credit,
            taught=self.learner.taught,
            untouched=self.learner.untouched or (),
        )
        for check in self.report.pieces.startup_checks:
            for finding in check(examined):
                self.report.warn(finding.text, by="doctor")

    def _measure(self, evaluator: HeldOut, step: int) -> Measured:
        measured = evaluator.measure(state=self.log.state)
        self.report.evaluated(step, measured)
        return measured

    def close(self) -> None:
        """Run the final evaluation and write the report."""
        self.report.console.end()
        last = self._measure(self.evaluator, self.progress.step) if self.evaluator else None
        if self.processes.main:
            self.report.close(last)
        self.final = last

    def without_unreadable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with readable media; if unreadable ones are an error, record them and raise."""
        if self.unreadable.drops:
            return self.unreadable.rest(prompts)
        if self.processes.main:
            self.unreadable.note(self.folder, self.pieces.made["data"])
        raise self.unreadable.error()

    # ---- checkpoints
    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        every = self.config.save_steps
        return step == self.config.max_steps or (every > 0 and step % every == 0)

    @contextmanager
    def whole_weights(self, *, changed: bool = False) -> Iterator[bool]:
        """Gather the weights of all models inside this context; yield whether this process has them.

        With `changed`, all processes take over the weights of process 0 on exit.
        """
        with ExitStack() as stack:
            models = [learner.policy.module for learner in self.learners]
            yield all([stack.enter_context(gathered(module, changed=changed)) for module in models])

    def rank_checkpoint(self) -> None:
        """Make the current checkpoint the best if it improves `metric_for_best_model`."""
        name, reported = self.config.metric_for_best_model, self.progress.reported
        if name and name not in reported:
            hint = nearest(name, reported) or f"there are {', '.join(sorted(reported))}"
            self.report.warn(
                f"'{name}' (metric_for_best_model) is not measured where checkpoints are written; {hint}"
            )
        elif name:
            self.progress.best.see(self.progress.step, reported[name], self.config.greater_is_better)

    def name_weights(self) -> str:
        """Hash the weights: store the hash of the frozen weights, and return the hash of the trained weights.

        Every process must call this, since shards are gathered one at a time. The base model is identified by
        frozen weights only: a checkpoint replaces the trained weights, and training may change buffers.
        """
        trained: list[Tensor] = []
        for learner in self.learners:
            trained += learner.trained
            frozen = of_weights(learner.policy, [*learner.trained, *learner.policy.module.buffers()])[:16]
            key, none = "base model", "no frozen weights"
            if learner.name:
                key, none = f"base model of '{learner.name}'", "frozen weights none"
            self.progress.inputs[key] = f"frozen weights {frozen}" if frozen else none
        return of_tensors(trained) if self.processes.world > 1 else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming, without the model's weights. Every process must call this."""
        return {
            "step": self.progress.step,
            "inputs": self.progress.inputs,
            "reported": self.progress.reported,
            **self.learner.state_dict(),
            **{
                kind: {name: piece.state_dict() for name, piece in pieces.items()}
                for kind, pieces in self.stateful.items()
            },
            "best": asdict(self.progress.best),
            "signal": self.signal.state_dict(),
            "ahead": [ahead.state_dict() for ahead in self.ahead],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `state_dict`; the model's weights must be loaded before."""
        self.learner.load_state_dict(state)
        for name, reference in self.stateful["references"].items():
            like = () if name in self.seconds else self.learner.trained  # critics have their own parameters
            reference.load_state_dict(reshard_state(state["references"][name], like))
        for place, piece in self.stateful["pieces"].items():
            piece.load_state_dict(state["pieces"][place])
        self.progress.step, self.progress.reported = state["step"], state["reported"]
        self.progress.best = Best(**state["best"])
        self.signal.load_state_dict(state["signal"])
        self.ahead = deque(map(InFlight.of_state, state["ahead"]))
