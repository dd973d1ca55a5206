"""What may go wrong inside a step: numbers that are none, and memory that is not there. Rows that are to
blame are written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mmrl.config.binding import Bound
from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch
from mmrl.core.types import Trajectory, Unit

if TYPE_CHECKING:
    from mmrl.training.trainer import Run

T = TypeVar("T")
FOLDER = "faults"


class NotFinite(FloatingPointError):
    """A loss or gradient that is not a number. The step was not taken."""


class ChainError(ValueError):
    """A piece of the advantage chain that raised, or gave no table or no finite numbers."""


class OutOfMemory(RuntimeError):
    """The device has no memory left, and there is nothing more that the run could make smaller itself."""


@dataclass
class Guard:
    """What a run remembers of an update until it is taken, and how many it did not take."""

    part: Batch | None = None
    suspects: list[Batch] = field(default_factory=list)  # micro-batches whose loss is not finite
    before: tuple[dict[str, Tensor], int] = ((), 0)  # the meter before the update
    skipped: int = 0  # updates that were not taken, of which `learn.max_skipped` may be
    written: int = 0  # files of this step
    halved: bool = False

    def begin(self, run: Run, part: Batch) -> None:
        """Remember where an update starts."""
        self.part, self.suspects = part, []
        self.before = (dict(run.meter.sums), run.meter.updates)

    def note(self, loss: Tensor, micro: Batch) -> None:
        """Suspect a micro-batch whose loss is no number."""
        if not math.isfinite(float(loss.detach())):
            self.suspects.append(micro)

    def forget(self, run: Run) -> None:
        """Undo what the update has left so far, so that nothing of it is in the next."""
        run.optimizer.zero_grad(set_to_none=True)
        run.meter.sums, run.meter.updates = dict(self.before[0]), self.before[1]
        self.suspects = []

    def passes(self, run: Run, norm: float) -> bool:
        """Tell whether an update may be taken; if not, write its rows down, and stop or count."""
        wrong = bool(self.suspects) or not math.isfinite(norm)
        if not run.processes.any(wrong):
            return True
        what = f"the gradient of step {run.stream.step} has the norm {norm}"
        if math.isfinite(norm):
            what = f"the loss of step {run.stream.step} is not finite"
        rows = self._to_blame(run)
        self.forget(run)
        path = dump(run, what, rows)
        self.written += 1
        learn = run.config.learn
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
        run.console.say(
            f"warning: {what}; the step was skipped ({self.skipped} of {learn.max_skipped}), its rows are in "
            f"'{path}'"
        )
        return False

    def _to_blame(self, run: Run) -> Batch:
        """Find the rows at fault: one by one where this process is alone, else all that are suspected."""
        if run.processes.world > 1:
            where = [micro.rows for micro in self.suspects] or [self.part.rows]
            return self.part.select(torch.isin(self.part.rows, torch.cat(where).cpu()).nonzero()[:, 0])
        run.optimizer.zero_grad(set_to_none=True)
        bad = [
            rows
            for rows, _ in self.part.cuts(1, max(run.needs.unit, Unit.ROW))
            if not _sound(run, self.part.select(rows))
        ]
        return self.part.select(torch.cat(bad)) if bad else self.part


def _sound(run: Run, rows: Batch) -> bool:
    """Tell whether the loss and the gradient of some rows alone are finite."""
    for micro in rows.split(run.micro_batch_steps, run.needs.unit):
        micro = micro.on(run.processes.device)
        loss, _ = run.objective(run.policy(micro, run.needs.extra), micro)
        if not math.isfinite(float(loss.detach())):
            return False
        gradients = torch.autograd.grad(loss, run.trained, allow_unused=True)
        if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
            return False
    return True


# ---- the advantage chain


def through_chain(chain: Sequence[Bound], table: RewardTable, step: int) -> RewardTable:
    """Send a reward table through the pieces of a chain, and name the first piece that fails, returns
    something else than a table of the same rows, or makes a valid value NaN or infinite."""
    for i, piece in enumerate(chain):
        name = f"advantage[{i}]: '{piece.entry.full_name}'"
        try:
            given = piece(table)
        except ConfigError:
            raise
        except Exception as error:
            raise ChainError(f"{name} raised {type(error).__name__} at step {step}: {error}") from error
        if not isinstance(given, RewardTable) or given.uids != table.uids:
            what = f"one of {len(given)} rows" if isinstance(given, RewardTable) else type(given).__name__
            raise ChainError(f"{name} must return a reward table of the same {len(table)} rows, not {what}")
        wrong = given.valid & ~given.values.isfinite()
        if wrong.any():
            row, column, place = wrong.nonzero()[0].tolist()
            raise ChainError(
                f"{name} made {int(wrong.sum())} valid values non-finite at step {step}, the first of them "
                f"{given.values[row, column, place].item()} for '{given.names[column]}' of prompt "
                f"'{given.uids[row]}', which was {_before(table, row, place)}; divide only where there is "
                "something to divide by, or mark the value as not valid"
            )
        table = given
    return table


def _before(table: RewardTable, row: int, place: int) -> str:
    return str(table.values[row, :, min(place, table.values.shape[2] - 1)].tolist())


# ---- what is left to look at


def dump(run: Run, what: str, rows: Batch) -> Path:
    """Write rows of the step table down: prompts and answers as JSON, numbers per step as safetensors."""
    from safetensors.torch import save_file

    folder = run.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    part = f"_process{run.processes.rank}" if run.processes.world > 1 else ""
    path = folder / f"step_{run.stream.step:06d}_{run.guard.written}{part}.json"
    written = {
        "step": run.stream.step,
        "what": what,
        "tensors": path.with_suffix(".safetensors").name,
        "rows": [
            {**_told(run.learned[place]), "advantage": _spelled(rows.advantage[i][rows.mask[i] > 0])}
            for i, place in enumerate(rows.rows.tolist())
        ],
    }
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False))
    tensors = {"mask": rows.mask, "advantage": rows.advantage, "weight": rows.weight}
    tensors |= {f"notes/{name}": note for name, note in rows.notes.items()}
    tensors |= {f"{name}/logp": said.logp for name, said in rows.others.items()}
    if run.processes.world == 1:
        with torch.no_grad():
            tensors["logp"] = run.policy(rows, frozenset()).logp
    save_file(
        {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()},
        path.with_suffix(".safetensors"),
    )
    return path


def _told(row: Trajectory) -> dict[str, Any]:
    last = row.outcomes[-1]
    return {
        "prompt": row.prompt.uid,
        "asked": row.prompt.text,
        "media": [medium.name for medium in row.prompt.media],
        "answer": last.text,
        "length": row.length,
        "on_policy": row.on_policy,
        "tags": dict(last.tags),
        "recorded": {name: _plain(value) for name, value in last.recorded.items()},
    }


def _spelled(values: Tensor) -> Any:
    """Write numbers as JSON has them; those that are none as words. All equal ones are one."""
    listed = [_plain(value) for value in values.detach().cpu().tolist()]
    return listed[0] if listed and all(value == listed[0] for value in listed) else listed


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# ---- memory


def largest_first(micros: list[Batch]) -> list[Batch]:
    """Put the micro-batch that holds most steps first: what does not fit fails at once, not after an hour."""
    cost: Callable[[Batch], int] = lambda micro: micro.steps.cost(torch.arange(len(micro)))
    return sorted(micros, key=cost, reverse=True)


def within_memory(run: Run, work: Callable[[], T]) -> T:
    """Do work that is cut by `micro_batch_steps`; where memory runs out, once in the life of a run, halve it
    and do the work again.

    With several processes there is no second try: the others already wait for gradients.
    """
    try:
        return work()
    except torch.OutOfMemoryError as error:
        now, guard = run.micro_batch_steps, run.guard
        if guard.halved or run.processes.world > 1 or now < 2:
            raise OutOfMemory(
                f"out of memory at step {run.stream.step} with {now} steps in a micro-batch"
                f"{' (halved once already)' if guard.halved else ''}: {_first_line(error)}. Set "
                f"learn.micro_batch_steps={max(1, now // 2)} or less, train an adapter, or turn gradient "
                "checkpointing on; `mmrl plan` tells what takes how much"
            ) from error
        guard.halved = True
        run.micro_batch_steps = now // 2
        said = _first_line(error)
    # Outside of the handler, where the frames of the failed pass no longer hold its tensors.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    run.console.say(
        f"warning: out of memory at step {run.stream.step} ({said}); learn.micro_batch_steps is halved from "
        f"{now} to {run.micro_batch_steps}, and the step is taken again"
    )
    return within_memory(run, work)


@contextmanager
def rolling_out(step: int) -> Iterator[None]:
    """Say what to do where an engine runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory while making rollouts of step {step}: {_first_line(error)}. Let the engine hold "
            "fewer at once (its `batch_size`), or shorten them"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def state_of(guard: Guard) -> Mapping[str, Any]:
    """Give what of a guard is saved with the run."""
    return {"skipped": guard.skipped, "halved": guard.halved}
