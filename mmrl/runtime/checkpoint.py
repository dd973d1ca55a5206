"""Checkpoint folders: tensors in safetensors, the rest in JSON, checksums, atomic renames, pruning."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.runtime.content_hash import of_file
from mmrl.runtime.files import flush, one_line, remove
from mmrl.runtime.folders import mark_of
from mmrl.runtime.state_tree import apart, flatten, unflatten

STATE = "trainer_state.json"
TENSORS = "trainer_state.safetensors"
SUMS = "SHA256SUMS"  # checksums of all other files, written last; `sha256sum -c` reads it
MODEL = "model"
log = logging.getLogger("mmrl")


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be read or written."""


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, strings and lists, and the SHA-256 of every file.

    All files are flushed to disk before this function returns.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    tree = flatten(state, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(apart(tensors), folder / TENSORS)
    (folder / STATE).write_text(json.dumps(tree))
    lines = []
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        # No checksum for the model card, which is rewritten after the last evaluation.
        if path.name not in (SUMS, "README.md"):
            lines.append(f"{of_file(path)}  {path.relative_to(folder).as_posix()}\n")
            flush(path)
    (folder / SUMS).write_text("".join(lines))
    # Flush the folders too: the name of a new file is on disk only after its folder is flushed.
    for path in (folder / SUMS, *filter(Path.is_dir, folder.rglob("*")), folder):
        flush(path)


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state that `write_state` wrote; raise `CheckpointError` if any file was changed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        sums = dict(line.split("  ", 1)[::-1] for line in (folder / SUMS).read_text().splitlines())
        changed = [
            name for name in {**sums, STATE: "", TENSORS: ""} if of_file(folder / name) != sums.get(name)
        ]
        if not changed:
            return unflatten(json.loads((folder / STATE).read_text()), load_file(folder / TENSORS))
        fault = f"'{changed[0]}' is cut short or damaged (its SHA-256 is not the one in {SUMS})"
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        fault = f"{type(error).__name__}: {error}"
    raise CheckpointError(f"'{folder}' is not a whole checkpoint of mmrl: {fault}")


def publish(unfinished: Path, folder: Path, warn: Callable[[str], None] = log.warning) -> None:
    """Rename a complete temporary folder, so that a checkpoint under its final name is always complete.

    An existing checkpoint of the same run is replaced, because it must be broken: the run did not resume
    from it. Any other non-empty folder of that name is moved aside.
    """
    if folder.is_dir() and any(folder.iterdir()) and not of_run(folder):
        aside = next(
            path for i in count(1) if not (path := folder.with_name(f"{folder.name}.other{i}")).exists()
        )
        folder.rename(aside)
        warn(f"'{folder}' was no checkpoint of this run; it was moved to '{aside}'")
    discard(folder)
    unfinished.rename(folder)
    flush(folder.parent)  # so that a power cut cannot undo the rename


def discard(folder: Path) -> None:
    """Remove a checkpoint; rename it first, so that a half-removed checkpoint never keeps the name."""
    if folder.exists() or folder.is_symlink():
        gone = folder.with_name(f"{folder.name}.gone.tmp")
        remove(gone)
        folder.rename(gone)
        remove(gone)


def tidy(output_dir: Path, warn: Callable[[str], None] = log.warning) -> None:
    """Remove the temporary folders of a killed process; `warn` gets a message if that fails."""
    for path in output_dir.glob("checkpoint-*.tmp"):
        _clear(path, remove, warn)


def checkpoints(output_dir: Path) -> list[Path]:
    """List the non-empty folders `checkpoint-STEP`, latest first; raise `OSError` for unreadable folders."""
    inside = list(output_dir.iterdir()) if output_dir.exists() else []
    numbered = [path for path in inside if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted((path for path in numbered if any(path.iterdir())), key=step_of, reverse=True)


def finished(output_dir: Path) -> list[Path]:
    """List the complete checkpoints of the run in a folder, the latest first."""
    complete = (
        path for path in checkpoints(output_dir) if (path / SUMS).is_file() and (path / STATE).is_file()
    )
    return [path for path in complete if of_run(path)]


def of_run(folder: Path) -> bool:
    """Whether the marker files of a checkpoint and of its output folder name the same run.

    False if that of the checkpoint is damaged.
    """
    run = mark_of(folder.parent).get("run")
    return run is None or mark_of(folder, allow_damaged=True).get("run", "") == run


def step_of(folder: Path) -> int:
    """Parse the step from the name of a checkpoint."""
    return int(folder.name.partition("-")[2])


def prune(
    output_dir: Path, limit: int, step: int, keep: int = 0, warn: Callable[[str], None] = log.warning
) -> None:
    """Remove checkpoints up to `step`, except the latest `limit` and the checkpoint of step `keep`.

    With `limit` 0 nothing is removed. Checkpoints after `step` stay and do not count; they must be broken,
    because the run did not resume from them. `warn` gets a message if a checkpoint cannot be removed.
    """
    reached = [folder for folder in finished(output_dir) if step_of(folder) <= step]
    for old in reached[limit:] if limit else ():
        if step_of(old) != keep:
            _clear(old, discard, warn)


def _clear(path: Path, how: Callable[[Path], None], warn: Callable[[str], None]) -> None:
    try:
        how(path)
    except OSError as error:
        warn(f"cannot remove the old folder '{path}': {one_line(error)}; remove it by hand to free room")


def model_folder(path: str) -> Path:
    """Return the model folder of a run (its latest checkpoint) or of a checkpoint, or `path` itself."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"'init_from' is '{path}', which is no folder; name that of a run or of a model")
    if latest := finished(folder):
        return latest[0] / MODEL
    if (folder / "config.yaml").exists() and not (folder / MODEL).is_dir():
        raise ConfigError(f"'init_from' is '{path}', a run without a checkpoint; name one that has saved")
    inner = folder / MODEL
    return inner if inner.is_dir() else folder
