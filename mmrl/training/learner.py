"""A trained model with its objective, advantage functions, optimizer, and guard against failed updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.registry import Needs
from mmrl.config.schema import Config
from mmrl.core.protocols import LogProbs, Policy
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch
from mmrl.core.types import Clock, Rollouts, Unit
from mmrl.references import Reference, SecondModel, other_models
from mmrl.reporting.metrics import Meter
from mmrl.runtime.distributed import Processes
from mmrl.runtime.fsdp import reshard_state
from mmrl.training.nonfinite import FOLDER, NotFinite, OutOfMemory, first_line, write_rows

T = TypeVar("T")
REFERENCES = "references"  # folder in a checkpoint, with a subfolder for each second model (a critic)


@dataclass(eq=False)
class Learner:
    """A model that is trained in a run: the policy, or an additional model such as a critic.

    Args:
        policy: The model.
        objective: The loss to minimise.
        chain: Functions, in order, that turn rewards into the advantages, or targets, of the objective.
        optimizer: Updates the trained parameters.
        learning_rate: A number, or a function of the clock, called once per training step.
        config: Configuration of the run.
        processes: Communication between the processes of the run.
        stream: Random streams of the run.
        references: Other policies by name, whose outputs the objective may read.
        say: Shows a line on the console.
        second: Settings of an additional model; None for the policy of the run.
        name: Name of an additional model in `references`; empty for the policy of the run.
    """

    policy: Policy
    objective: Any
    chain: Sequence[Bound]
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[Clock], float] | float
    config: Config
    processes: Processes
    stream: Stream
    references: Mapping[str, Reference | SecondModel]
    say: Callable[[str], None]
    second: SecondModel | None = None
    name: str = ""
    untouched: list[str] | None = None  # trained parameters without a gradient in the first update
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(self, self.config.learn.micro_batch_steps)
        settings = self.second or self.config.learn
        self.num_iterations: int = settings.num_iterations  # PPO epochs over a step's rollouts
        self.minibatches: int = settings.minibatches  # optimizer steps per pass
        # Name of the reference that samples rollouts and serves as `old`; "": the policy itself.
        self.rollout_policy = "" if self.second else self.config.rollout.policy

    @property
    def needs(self) -> Needs:
        """What the objective reads (model outputs, other policies), and the smallest possible micro-batch."""
        return self.objective.needs

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [parameter for parameter in self.policy.module.parameters() if parameter.requires_grad]

    @property
    def others(self) -> dict[str, LogProbs]:
        """The policies whose log-probabilities the batch needs, by name.

        The sampling policy `old` is evaluated if the weights change before the last update of a training
        step, if a reference sampled the rollouts, or if the objective reads `old` or the log-probabilities of
        the engine. Otherwise the detached current log-probabilities serve as `old`.
        """
        names = self.needs.others
        needed: dict[str, LogProbs] = {
            name: self.references[name] for name in names if name in self.references
        }
        moves = self.num_iterations * self.minibatches > 1
        if moves or self.rollout_policy or {"old", "engine"} & set(names):
            needed["old"] = self.references.get(self.rollout_policy, self.policy)
        return needed

    @property
    def taught(self) -> bool:
        """Whether the objective reads another model than the policy, such as a teacher."""
        return bool(other_models(self.references) & {*self.needs.others})

    def set_learning_rate(self, clock: Clock) -> None:
        """Set the optimizer's learning rate for a training step."""
        rate = self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate(clock) if callable(rate) else rate

    def step_optimizer(self) -> None:
        """Take an optimizer step and update moving averages, unless a loss or gradient is not finite."""
        if self.untouched is None:  # the first update, before `zero_grad` frees gradients
            named = self.policy.module.named_parameters()
            self.untouched = [name for name, p in named if p.requires_grad and p.grad is None]
        if self.guard.step_optimizer():
            for reference in () if self.second else self.references.values():
                reference.update()  # moving averages decay per optimizer step

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; metric names of an additional model begin with its name."""
        metrics = self.guard.meter.take()
        if not self.name:
            return metrics
        # Moments of importance weights make sense only for the policy, not for a critic.
        return {
            f"{self.name}/{key}": value for key, value in metrics.items() if not key.startswith("moments/")
        }

    def save(self, checkpoint: Path) -> None:
        """Write this additional model, such as a critic, into a checkpoint; weights must be unsharded."""
        self.policy.save(checkpoint / REFERENCES / self.name)

    def load(self, checkpoint: Path) -> None:
        """Load the weights that `save` wrote."""
        self.policy.load(checkpoint / REFERENCES / self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the update guard, without weights."""
        return {"optimizer": self.optimizer.state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the weights must be loaded before."""
        self.optimizer.load_state_dict(reshard_state(state["optimizer"], self.trained))
        self.guard.load_state_dict(state["guard"])


def second_learners(
    config: Config,
    processes: Processes,
    stream: Stream,
    references: Mapping[str, Reference | SecondModel],
    say: Callable[[str], None],
) -> dict[str, Learner]:
    """Create the learners of the additional models in `references`, by name, placed on their devices."""
    learners = {}
    for name, second in references.items():
        match second:
            case SecondModel():
                optimizer = processes.place(second.model, second.optimizer)
                rate = partial(_current_rate, second)
                parts = (second.model, second.objective, second.advantage, optimizer, rate)
                learners[name] = Learner(*parts, config, processes, stream, references, say, second, name)
    return learners


def _current_rate(second: SecondModel, clock: Clock) -> float:
    return second.learning_rate  # already updated by its schedule


@dataclass(frozen=True)
class Update:
    """An update in progress: forward and backward passes over a minibatch, up to the optimizer step."""

    part: Batch
    sums: Mapping[str, Tensor]  # metric sums before the update
    updates: int  # number of updates that `sums` contains
    suspects: list[Batch] = field(default_factory=list)  # micro-batches whose loss is not finite


@dataclass
class Guard:
    """Skips or refuses non-finite optimizer steps; halves micro-batches once if memory runs out."""

    learner: Learner
    micro_batch_steps: int
    halved: bool = False
    skipped: int = 0  # number of skipped optimizer steps, at most `learn.max_skipped`
    updates: int = 0  # optimizer steps in this training step with gradient and learning rate above 0
    written: int = 0  # number of files with faulty rows in this training step
    rollouts: Rollouts = ()  # the rollouts that the batch's `rows` index
    current: Update | None = None
    meter: Meter = field(default_factory=Meter)

    @property
    def update(self) -> Update:
        """The update in progress; it ends with the optimizer step."""
        assert self.current is not None, "no update has begun"
        return self.current

    def begin(self, part: Batch) -> None:
        """Begin an update, and save the metric sums that `forget` restores."""
        self.current = Update(part, dict(self.meter.sums), self.meter.updates)

    def note(self, loss: Tensor, metrics: Mapping[str, Tensor], micro: Batch, counts: float) -> None:
        """Add the metrics of a micro-batch; mark it as suspect if its loss is not finite."""
        self.meter.add({"loss": loss, **metrics}, counts)
        if counts and not math.isfinite(float(loss.detach())):
            self.update.suspects.append(micro)

    def forget(self) -> None:
        """Clear the gradients, metrics and suspect micro-batches of the current update."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.meter.sums, self.meter.updates = dict(self.update.sums), self.update.updates
        self.update.suspects.clear()

    def step_optimizer(self) -> bool:
        """Clip the gradients and take an optimizer step; return False if the step was skipped."""
        learner, optimizer = self.learner, self.learner.optimizer
        norm = learner.processes.clip(learner.trained, learner.config.learn.max_grad_norm)
        if not self.passes(norm):
            return False
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.meter.add({"grad_norm": torch.tensor(norm)}, 1.0)
        self.updates += norm > 0 and any(group["lr"] for group in optimizer.param_groups)
        self.meter.updates += 1  # not for skipped steps: `forget` removed their sums
        return True

    def end_step(self) -> None:
        """Free the batch and reset the counts of the training step."""
        self.current, self.written, self.updates = None, 0, 0

    def passes(self, norm: float) -> bool:
        """Whether loss and gradient norm are finite; if not, write the faulty rows, then raise or skip.

        `norm` is the gradient norm. Raises `NotFinite` if `learn.on_nonfinite` is "stop", or after more than
        `learn.max_skipped` skipped steps.
        """
        learner, learn = self.learner, self.learner.config.learn
        wrong = bool(self.update.suspects) or not math.isfinite(norm)
        if not learner.processes.any(wrong):  # all processes step or none, to keep weights equal
            return True
        whose = f" of '{learner.name}'" if learner.name else ""
        what = f"the loss{whose} of step {learner.stream.step} is not finite"
        if not math.isfinite(norm):
            what = f"the gradient{whose} of step {learner.stream.step} has the norm {norm}"
        rows = self._rows_to_blame()  # before `forget` clears the suspects
        self.forget()
        path = self._write(what, rows)
        if learn.on_nonfinite == "stop":
            raise NotFinite(
                f"{what}; the step was not taken, and its rows are in '{path}'. Lower learn.learning_rate or "
                "learn.max_grad_norm, look at the rewards of this step, or set learn.on_nonfinite=skip"
            )
        self.skipped += 1
        if self.skipped > learn.max_skipped:
            raise NotFinite(
                f"{what}; that is the {self.skipped}. step that was not taken, and learn.max_skipped allows "
                f"{learn.max_skipped}. Their rows are in '{path.parent}'"
            )
        learner.say(
            f"warning: {what}; the step was skipped ({self.skipped} of {learn.max_skipped}), its rows are in "
            f"'{path}'"
        )
        return False

    def _rows_to_blame(self) -> Batch:
        """Select the faulty rows: test each row (one process), or take all rows of suspect micro-batches."""
        part = self.update.part
        if self.learner.processes.world > 1:
            # Not row by row: a sharded pass needs all processes, which have different numbers of rows.
            where = [micro.rows for micro in self.update.suspects] or [part.rows]
            return part.select(torch.isin(part.rows, torch.cat(where).cpu()).nonzero()[:, 0])
        self.learner.optimizer.zero_grad(set_to_none=True)
        cuts = part.cuts(1, max(self.learner.needs.unit, Unit.ROW))  # each cut is one row or one group
        bad = [rows for rows, _ in cuts if not self.is_finite(part.select(rows))]
        return part.select(torch.cat(bad)) if bad else part

    def is_finite(self, rows: Batch) -> bool:
        """Whether the loss and the gradient of these rows alone are finite."""
        learner = self.learner
        for micro in rows.split(self.micro_batch_steps, learner.needs.unit):
            micro = micro.on(learner.processes.device)
            loss, _ = learner.objective(learner.policy(micro, learner.needs.outputs), micro)
            if not math.isfinite(float(loss.detach())):
                return False
            gradients = torch.autograd.grad(loss, learner.trained, allow_unused=True)  # leaves `.grad` unset
            if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
                return False
        return True

    def _write(self, what: str, rows: Batch) -> Path:
        """Write faulty rows into the folder `faults` of the run; return the path of their JSON file."""
        learner, alone = self.learner, self.learner.processes.world == 1
        folder, step = Path(learner.config.output_dir) / FOLDER, learner.stream.step
        folder.mkdir(parents=True, exist_ok=True)
        process = "" if alone else f"_process{learner.processes.rank}"
        name = "_".join(filter(None, (f"step_{step:06d}", learner.name, str(self.written))))
        path, more = folder / f"{name}{process}.json", dict[str, Tensor]()
        if alone:
            with torch.no_grad():
                more["logp"] = learner.policy(rows, frozenset()).logp
        write_rows(path, step, what, rows, self.rollouts, more)
        self.written += 1
        return path

    def within_memory(self, work: Callable[[], T]) -> T:
        """Run `work`; if memory runs out, halve `micro_batch_steps` and retry, at most once in a run.

        With several processes there is no retry, because the others already wait for gradients.
        """
        step = self.learner.stream.step
        try:
            return work()
        except torch.OutOfMemoryError as error:
            steps = self.micro_batch_steps
            if self.halved or self.learner.processes.world > 1 or steps < 2:
                raise OutOfMemory(
                    f"out of memory at step {step} with {steps} steps in a micro-batch"
                    f"{' (halved once already)' if self.halved else ''}: {first_line(error)}. Set "
                    f"learn.micro_batch_steps={max(1, steps // 2)} or less, train an adapter, or turn "
                    "gradient checkpointing on; `mmrl estimate-memory` lists what takes how much"
                ) from error
            self.halved, self.micro_batch_steps = True, steps // 2
            message = first_line(error)
        # Outside of the `except` block, whose traceback would keep the tensors of the failed pass alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.learner.say(
            f"warning: out of memory at step {step} ({message}); learn.micro_batch_steps is "
            f"halved from {steps} to {self.micro_batch_steps}, and the step is taken again"
        )
        return self.within_memory(work)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped steps and the current micro-batch size."""
        return {"skipped": self.skipped, "halved": self.halved, "micro_batch_steps": self.micro_batch_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.skipped, self.halved = state["skipped"], state["halved"]
        self.micro_batch_steps = state["micro_batch_steps"]
