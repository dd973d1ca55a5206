"""Guards an update against losses and gradients that are not finite, and against memory that runs out.

The rows to blame for a loss or gradient that is not finite are written to the folder `faults` of the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mmrl.config.registry import Needs
from mmrl.config.schema import Config
from mmrl.core.protocols import Policy
from mmrl.core.rng import Stream
from mmrl.core.step_table import Batch
from mmrl.core.types import Rollouts, Trajectory, Unit
from mmrl.reporting.metrics import Meter
from mmrl.runtime.distributed import Processes
from mmrl.runtime.files import write_whole

T = TypeVar("T")
FOLDER = "faults"


class WithObjective(Protocol):
    """A model and what it minimises: the policy of a run, or a second model."""

    @property
    def policy(self) -> Policy:
        """The model."""
        ...

    @property
    def objective(self) -> Any:
        """What it minimises."""
        ...

    @property
    def needs(self) -> Needs:
        """What the objective reads."""
        ...


class Learned(WithObjective, Protocol):
    """What an update moves: a model with its objective and its optimizer."""

    optimizer: torch.optim.Optimizer

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer moves."""
        ...


class NotFinite(FloatingPointError):
    """A loss or gradient is NaN or infinite; the optimizer step was not taken."""


class OutOfMemory(RuntimeError):
    """The device is out of memory, and the run cannot make its micro-batches smaller by itself."""


@dataclass(frozen=True)
class Update:
    """One pass over a part of a batch, up to its optimizer step."""

    part: Batch
    sums: Mapping[str, Tensor]  # of the meter, before the update
    updates: int  # that the meter counted before
    suspects: list[Batch] = field(default_factory=list)  # micro-batches whose loss is not finite


@dataclass
class Guard:
    """Refuses optimizer steps that are not finite, and halves micro-batches once when memory runs out."""

    config: Config
    method: Learned
    processes: Processes
    stream: Stream
    say: Callable[[str], None]
    micro_batch_steps: int
    of: str = ""  # name of a second model
    halved: bool = False
    skipped: int = 0  # optimizer steps not taken, of which `learn.max_skipped` are allowed
    updates: int = 0  # optimizer steps of this step with a gradient and a learning rate above 0
    written: int = 0  # files of rows to blame in this step
    rollouts: Rollouts = ()  # the rows of the batch
    current: Update | None = None  # the update that is under way
    meter: Meter = field(default_factory=Meter)

    def watch(self, rollouts: Rollouts) -> None:
        """Remember the rollouts that the rows of the next batch come from."""
        self.rollouts = rollouts

    @property
    def update(self) -> Update:
        """The update that is under way."""
        assert self.current is not None, "no update has begun"
        return self.current

    def begin(self, part: Batch) -> None:
        """Begin an update."""
        self.current = Update(part, dict(self.meter.sums), self.meter.updates)  # where `forget` goes back to

    def note(self, loss: Tensor, metrics: Mapping[str, Tensor], micro: Batch, counts: float) -> None:
        """Add the metrics of a micro-batch, and remember it where its loss is not finite."""
        self.meter.add({"loss": loss, **metrics}, counts)
        if counts and not math.isfinite(float(loss.detach())):
            self.update.suspects.append(micro)

    def forget(self) -> None:
        """Undo what the update has left so far in gradients and metrics."""
        self.method.optimizer.zero_grad(set_to_none=True)
        self.meter.sums, self.meter.updates = dict(self.update.sums), self.update.updates
        self.update.suspects.clear()

    def step_optimizer(self) -> bool:
        """Clip gradients, step and zero them; return False for a step that is not finite and was skipped."""
        method = self.method
        norm = self.processes.clip(method.trained, self.config.learn.max_grad_norm)
        if not self.passes(norm):
            return False
        method.optimizer.step()
        method.optimizer.zero_grad(set_to_none=True)
        self.meter.add({"grad_norm": torch.tensor(norm)}, 1.0)
        self.updates += norm > 0 and any(group["lr"] for group in method.optimizer.param_groups)
        self.meter.updates += 1  # a skipped update left no sums: `forget` undid them
        return True

    def end_step(self) -> None:
        """Free the batch of the step."""
        self.current, self.written, self.updates = None, 0, 0

    def passes(self, norm: float) -> bool:
        """Return whether an optimizer step may be taken; else write its rows down, and stop or count.

        `norm` is that of the gradient. Raises `NotFinite` where `learn.on_nonfinite` is "stop", or more than
        `learn.max_skipped` steps were skipped.
        """
        wrong = bool(self.update.suspects) or not math.isfinite(norm)
        if not self.processes.any(wrong):  # all step or none, so that their weights stay equal
            return True
        step, learn = self.stream.step, self.config.learn
        whose = f" of '{self.of}'" if self.of else ""
        what = f"the loss{whose} of step {step} is not finite"
        if not math.isfinite(norm):
            what = f"the gradient{whose} of step {step} has the norm {norm}"
        rows = self._rows_to_blame()  # before `forget` clears the suspects
        self.forget()
        path = self._dump(what, rows)
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
        self.say(
            f"warning: {what}; the step was skipped ({self.skipped} of {learn.max_skipped}), its rows are in "
            f"'{path}'"
        )
        return False

    def _rows_to_blame(self) -> Batch:
        """Find the rows at fault: one by one on a single process, else all of suspected micro-batches."""
        part = self.update.part
        if self.processes.world > 1:
            # Row by row, processes would make different numbers of passes, and sharded passes wait for all.
            where = [micro.rows for micro in self.update.suspects] or [part.rows]
            return part.select(torch.isin(part.rows, torch.cat(where).cpu()).nonzero()[:, 0])
        self.method.optimizer.zero_grad(set_to_none=True)
        cuts = part.cuts(1, max(self.method.needs.unit, Unit.ROW))  # one row or group each, however long
        bad = [rows for rows, _ in cuts if not self.is_finite(part.select(rows))]
        return part.select(torch.cat(bad)) if bad else part

    def is_finite(self, rows: Batch) -> bool:
        """Return whether the loss and the gradient of some rows by themselves are finite."""
        method = self.method
        for micro in rows.split(self.micro_batch_steps, method.needs.unit):
            micro = micro.on(self.processes.device)
            loss, _ = method.objective(method.policy(micro, method.needs.outputs), micro)
            if not math.isfinite(float(loss.detach())):
                return False
            gradients = torch.autograd.grad(loss, method.trained, allow_unused=True)  # `.grad` stays empty
            if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
                return False
        return True

    def _dump(self, what: str, rows: Batch) -> Path:
        """Write rows of the step table: prompts and answers as JSON, numbers of every step as safetensors."""
        from safetensors.torch import save_file

        folder = Path(self.config.output_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        process = f"_process{self.processes.rank}" if self.processes.world > 1 else ""
        name = "_".join(filter(None, (f"step_{self.stream.step:06d}", self.of, str(self.written))))
        path = folder / f"{name}{process}.json"
        written = {
            "step": self.stream.step,
            "what": what,
            "tensors": path.with_suffix(".safetensors").name,
            "rows": [
                {**_described(self.rollouts[place]), "advantage": _numbers(advantage[mask > 0])}
                for place, advantage, mask in zip(rows.rows.tolist(), rows.advantage, rows.mask, strict=True)
            ],
        }
        write_whole(path, json.dumps(written, indent=1, ensure_ascii=False))
        tensors = {"mask": rows.mask, "advantage": rows.advantage, "weight": rows.weight}
        tensors |= {f"notes/{name}": note for name, note in rows.notes.items()}
        tensors |= {f"{name}/logp": output.logp for name, output in rows.others.items()}
        if self.processes.world == 1:
            with torch.no_grad():
                tensors["logp"] = self.method.policy(rows, frozenset()).logp
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()},
            path.with_suffix(".safetensors"),
        )
        self.written += 1
        return path

    def within_memory(self, work: Callable[[], T]) -> T:
        """Do work that is cut by `micro_batch_steps`; if memory runs out, halve it and repeat, once in a run.

        With several processes there is no second try, because the others already wait for gradients.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            steps = self.micro_batch_steps
            if self.halved or self.processes.world > 1 or steps < 2:
                raise OutOfMemory(
                    f"out of memory at step {self.stream.step} with {steps} steps in a micro-batch"
                    f"{' (halved once already)' if self.halved else ''}: {_first_line(error)}. Set "
                    f"learn.micro_batch_steps={max(1, steps // 2)} or less, train an adapter, or turn "
                    "gradient checkpointing on; `mmrl estimate-memory` lists what takes how much"
                ) from error
            self.halved, self.micro_batch_steps = True, steps // 2
            message = _first_line(error)
        # Outside of the handler, where the frames of the failed pass no longer keep its tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.say(
            f"warning: out of memory at step {self.stream.step} ({message}); learn.micro_batch_steps is "
            f"halved from {steps} to {self.micro_batch_steps}, and the step is taken again"
        )
        return self.within_memory(work)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved with the run."""
        return {"skipped": self.skipped, "halved": self.halved, "micro_batch_steps": self.micro_batch_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.skipped, self.halved = state["skipped"], state["halved"]
        self.micro_batch_steps = state["micro_batch_steps"]


@contextmanager
def rolling_out(step: int) -> Iterator[None]:
    """Add advice to an error of an engine that runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory while making rollouts of step {step}: {_first_line(error)}. Let the engine hold "
            "fewer at once (its `batch_size`), or shorten them"
        ) from error


def largest_first(micros: list[Batch]) -> list[Batch]:
    """Sort micro-batches by their steps, so that one that does not fit into memory fails at once."""
    return sorted(micros, key=lambda micro: micro.steps.cost(torch.arange(len(micro))), reverse=True)


def _described(row: Trajectory) -> dict[str, Any]:
    last = row.outcomes[-1]
    return {
        "prompt": row.prompt.uid,
        "asked": row.prompt.text,
        "media": [medium.name for medium in row.prompt.media],
        "answer": last.text,
        "length": row.length,
        "on_policy": row.on_policy,
        "tags": dict(last.tags),
        "recorded": {name: _as_json(value) for name, value in last.recorded.items()},
    }


def _numbers(values: Tensor) -> Any:
    """Convert to JSON; numbers that are all equal become one."""
    listed = [_as_json(value) for value in values.detach().cpu().tolist()]
    return listed[0] if listed and all(value == listed[0] for value in listed) else listed


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has neither NaN nor infinity


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
