"""Marker files in output folders, so that no other command writes into or empties them."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.runtime.files import LOCK, hold, remove, write_whole

MARK = ".mmrl"  # JSON: `by` (the command that created the folder) and further facts
UNFINISHED = ".unfinished"  # folder inside an output folder, for incomplete new content
NO_CONTENT = (LOCK, MARK, UNFINISHED)
SHOWN = 3


def mark(folder: Path, by: str, **facts: Any) -> None:
    """Write a folder's marker file: the command that created it, and further facts."""
    write_whole(folder / MARK, json.dumps({"by": by, **facts}, sort_keys=True) + "\n")


def mark_of(folder: Path, *, allow_damaged: bool = False) -> dict[str, Any]:
    """Read a folder's marker file, or infer `by` from its content; {} if mmrl did not make the folder.

    Raises `ConfigError` for a damaged marker file, or returns {} if `allow_damaged`.
    """
    if not (folder / MARK).exists():
        by = next((by for by, proof in _PROOFS.items() if proof(folder)), "")
        return {"by": by} if by else {}
    try:
        parsed = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parsed = error
    if isinstance(parsed, dict) and isinstance(parsed.get("by"), str):
        return parsed
    if allow_damaged:
        return {}
    reason = parsed if isinstance(parsed, Exception) else "wanted a JSON object with `by`"
    raise ConfigError(
        f"'{folder / MARK}', which records what made '{folder}', is damaged ({reason}); restore or delete it"
    )


def content(folder: Path) -> list[Path]:
    """List the content of a folder except marks and locks; return [] for a missing folder."""
    return sorted(path for path in folder.iterdir() if path.name not in NO_CONTENT) if folder.is_dir() else []


def check_writable(folder: Path) -> None:
    """Raise `ConfigError` if a folder cannot be created or written to."""
    there = folder.absolute()
    while not (there.exists() or there.is_symlink()) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"'{folder}' cannot be a folder: '{there}' is no folder; name another")
    try:
        with tempfile.TemporaryFile(dir=there):  # `os.access` is always true for root
            pass
    except OSError as error:
        reason = f"'{there}' takes no file ({error.strerror})"
        raise ConfigError(f"nothing can be written into '{folder}': {reason}; name another") from error


def check_owner(folder: Path, by: str, writes: Iterable[str] | None = None) -> dict[str, Any]:
    """Raise `ConfigError` if a command must not write into a folder; return the folder's marker file.

    Args:
        folder: Output folder of the command; it need not exist.
        by: The command: `train`, `evaluate`, `build` or `export`.
        writes: Names of files and folders that the command writes; the folder may hold other files. None:
            the folder must be empty or made by this command.
    """
    check_writable(folder)
    owner, there = mark_of(folder), content(folder)
    if there and owner.get("by", by) != by:
        raise ConfigError(
            f"'{folder}' was made by `mmrl {owner['by']}`, and `mmrl {by}` does not write into it; name "
            "another folder"
        )
    if not owner:
        taken = there if writes is None else [path for path in there if path.name in set(writes)]
        names = [path for path in taken if not path.is_dir() or any(path.iterdir())]
        if names:
            raise ConfigError(
                f"'{folder}' holds {_listed(names)}, which no `mmrl {by}` made; name another "
                "folder, or move that away"
            )
    return owner


def _listed(paths: Sequence[Path]) -> str:
    """Format the first `SHOWN` paths and the number of further ones."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(path.name for path in paths[:SHOWN]) + more


@contextmanager
def making(folder: Path, by: str, *, overwrite: bool = False, **facts: Any) -> Iterator[Path]:
    """Yield a temporary folder that replaces the content of `folder` on exit.

    If the process is killed, the old content stays. A command may replace output that it wrote with the
    same `facts`, which the marker file records.

    Raises:
        ConfigError: Another process is writing the folder, or its content must not be replaced.
    """
    check_replaceable(folder, by, overwrite=overwrite, **facts)
    existed, unfinished = folder.is_dir(), folder / UNFINISHED
    try:
        with hold(folder, leave=False):
            check_replaceable(folder, by, overwrite=overwrite, **facts)  # again, now locked
            remove(unfinished)  # left by a killed process
            new_folder = unfinished / "new" / folder.resolve().name  # files may contain the folder's name
            new_folder.parent.mkdir(parents=True)  # the caller makes the folder itself
            try:
                yield new_folder
                check_replaceable(folder, by, overwrite=overwrite, **facts)  # other programs may write
                mark(folder, by, **facts)
                _move(folder, unfinished / "old")
                _move(new_folder, folder)
            finally:
                remove(unfinished)
    finally:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def written_whole(output: Path) -> Iterator[Path]:
    """Yield a temporary path for `output`; on exit move the file and files beside it to their final folder.

    After an error no file is moved, and existing files stay. Moved files replace files of the same name.
    """
    output = output.absolute()
    there = next(folder for folder in output.parents if folder.is_dir())
    with tempfile.TemporaryDirectory(dir=there, prefix=".mmrl-") as unfinished:
        yield Path(unfinished) / output.name
        for path in filter(Path.is_file, Path(unfinished).rglob("*")):
            target = output.parent / path.relative_to(unfinished)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)


def _move(source: Path, target: Path) -> None:
    """Move the content of a folder into another folder on the same disk."""
    target.mkdir(exist_ok=True)
    for path in content(source):
        path.rename(target / path.name)


def check_replaceable(folder: Path, by: str, *, overwrite: bool = False, **facts: Any) -> None:
    """Raise `ConfigError` if a command must not replace the content of a folder."""
    owner = check_owner(folder, by)
    same = bool(facts) and json.loads(json.dumps(facts)) == {k: v for k, v in owner.items() if k != "by"}
    if content(folder) and not overwrite and not same:
        raise ConfigError(
            f"'{folder}' exists and is not empty; name another folder, or give --overwrite to replace "
            f"{_listed(content(folder))}"
        )


# ---- folders of earlier versions, which have no mark


def _trained(folder: Path) -> bool:
    """Return whether a folder contains a training run or the stages of a run."""
    config = folder / "config.yaml"
    if (folder / "stages.json").is_file() or next(folder.glob("checkpoint-*/SHA256SUMS"), None):
        return True
    if not config.is_file():
        return False
    keys = re.findall(r"^(\w+):", config.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return (folder / "metrics.jsonl").is_file() or {"policy", "data", "rollout", "output_dir"} <= {*keys}


def _has_keys(file: Path, *names: str) -> bool:
    """Return whether a file holds a JSON object with these keys."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(parsed, Mapping) and parsed.keys() >= {*names}


def _exported(folder: Path) -> bool:
    """Return whether a folder has a model card of mmrl and is not inside a checkpoint."""
    card = folder / "README.md"
    tagged = card.is_file() and re.search(r"^tags: \[mmrl\b", card.read_text(errors="replace"), re.MULTILINE)
    return bool(tagged) and not re.fullmatch(r"checkpoint-\d+", folder.resolve().parent.name)


_PROOFS = {
    "train": _trained,
    "evaluate": lambda folder: any(
        _has_keys(folder / "evaluation.json", key) for key in ("metrics", "settings")
    ),
    "build": lambda folder: (
        _has_keys(folder / "manifest.json", "counts") or (folder / ".build" / "plan.json").is_file()
    ),
    "export": _exported,
}
