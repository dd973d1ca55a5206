"""Errors of updates that are not finite or run out of memory, and files with the faulty rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.step_table import Batch
from mmrl.core.types import Rollouts, Trajectory
from mmrl.runtime.files import write_whole

FOLDER = "faults"  # folder inside the output folder of a run


class NotFinite(FloatingPointError):
    """Raised if a loss or gradient is NaN or infinite; the optimizer step was not taken."""


class OutOfMemory(RuntimeError):
    """Raised if the device is out of memory and the run cannot make its micro-batches smaller by itself."""


def write_rows(
    path: Path, step: int, what: str, rows: Batch, rollouts: Rollouts, more: Mapping[str, Tensor]
) -> None:
    """Write faulty rows of a batch for inspection.

    Prompts and answers go into a JSON file, per-step tensors into a safetensors file of the same name.

    Args:
        path: The JSON file.
        step: Training step of the update.
        what: Description of the fault.
        rows: The faulty rows.
        rollouts: The rollouts that `rows.rows` indexes.
        more: Further tensors by name.
    """
    from safetensors.torch import save_file

    written = {
        "step": step,
        "what": what,
        "tensors": path.with_suffix(".safetensors").name,
        "rows": [
            {**_described(rollouts[place]), "advantage": _numbers(advantage[mask > 0])}
            for place, advantage, mask in zip(rows.rows.tolist(), rows.advantage, rows.mask, strict=True)
        ],
    }
    write_whole(path, json.dumps(written, indent=1, ensure_ascii=False))
    tensors = {"mask": rows.mask, "advantage": rows.advantage, "weight": rows.weight}
    tensors |= {f"notes/{name}": note for name, note in rows.notes.items()}
    tensors |= {f"{name}/logp": output.logp for name, output in rows.others.items()}
    save_file(
        {name: t.detach().cpu().contiguous().clone() for name, t in {**tensors, **more}.items()},
        path.with_suffix(".safetensors"),
    )


@contextmanager
def rolling_out(step: int) -> Iterator[None]:
    """Raise `OutOfMemory` with advice if an engine runs out of memory inside this context."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory while making rollouts of step {step}: {first_line(error)}. Let the engine hold "
            "fewer at once (its `batch_size`), or shorten them"
        ) from error


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
    """Convert a tensor to a JSON list, or to a single number if all its values are equal."""
    listed = [_as_json(value) for value in values.detach().cpu().tolist()]
    return listed[0] if listed and all(value == listed[0] for value in listed) else listed


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has neither NaN nor infinity


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
