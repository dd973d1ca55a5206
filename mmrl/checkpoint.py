"""Saving a run so that it goes on exactly: tensors in safetensors, everything else in JSON, written beside
and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

STATE = "trainer_state.json"
TENSORS = "trainer_state.safetensors"
MODEL = "model"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used."""


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, strings and lists."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    tree = _without_tensors(state, "", tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / TENSORS)
    # The JSON comes last and knows every other file, so that a folder cut short is recognised.
    files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    (folder / STATE).write_text(json.dumps({"files": files, "tensors": sorted(tensors), "state": tree}))


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote, or say what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        written = json.loads((folder / STATE).read_text())
        tensors = load_file(folder / TENSORS)
        missing = set(written["tensors"]) - set(tensors)
        tree = written["state"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"'{folder}' is not a whole checkpoint of mmrl: {type(error).__name__}: {error}"
        ) from error
    if missing:
        raise CheckpointError(f"'{folder}' lacks the tensors {sorted(missing)[:3]}")
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    short = [name for name, size in written.get("files", {}).items() if sizes.get(name) != size]
    if short:
        raise CheckpointError(f"'{folder}' is not a whole checkpoint of mmrl: '{short[0]}' is cut short")
    return _with_tensors(tree, tensors)


def _files(folder: Path) -> list[Path]:
    # The model card may be written anew when more was measured.
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in (STATE, "README.md")
    )


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            tensors[path] = value
            return {"tensor": path}
        case Mapping():
            # A list of pairs, because JSON would turn the whole-number keys of optimizers into strings.
            pairs = [(key, _without_tensors(inner, f"{path}/{key}", tensors)) for key, inner in value.items()]
            return {"map": pairs}
        case list() | tuple():
            return {
                "list": [_without_tensors(inner, f"{path}/{i}", tensors) for i, inner in enumerate(value)]
            }
        case None | bool() | int() | float() | str():
            return {"plain": value}
    raise TypeError(
        f"cannot save '{path}': a state holds tensors, numbers and strings, not {type(value).__name__}"
    )


def _with_tensors(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "map" in tree:
        return {key: _with_tensors(inner, tensors) for key, inner in tree["map"]}
    if "list" in tree:
        return [_with_tensors(inner, tensors) for inner in tree["list"]]
    return tree["plain"]


def publish(beside: Path, folder: Path) -> None:
    """Move a finished folder to its name, so that nobody ever sees half of it."""
    for file in beside.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


def checkpoints(output_dir: Path) -> list[Path]:
    """List checkpoints, the latest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Read the number of a checkpoint off its name."""
    return int(folder.name.partition("-")[2])


def prune(output_dir: Path, limit: int, step: int, keep: int = 0) -> None:
    """Keep the latest `limit` checkpoints up to `step`, and the one of step `keep`; a limit of 0 keeps all.

    Later ones are broken, since the run went on from before them: they must not push out whole ones.
    """
    reached = [folder for folder in checkpoints(output_dir) if step_of(folder) <= step]
    for old in reached[limit:] if limit else []:
        if step_of(old) != keep:
            shutil.rmtree(old)
