"""What a configuration names outside of itself: files, folders, and columns of the first rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any

from mmrl.config import objects
from mmrl.config.consistency import evaluation_of
from mmrl.config.loading import ConfigError
from mmrl.config.registry import find
from mmrl.config.reward_adapters import is_trl
from mmrl.config.schema import Config, EvaluateConfig, Piece
from mmrl.data.dataset_io import FORMS, Rows
from mmrl.data.fields import RowError

FIRST = 20  # rows whose columns are looked at
OFFERED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "target",
)  # `reward_adapters.from_trl`


def check_inputs(config: Config | EvaluateConfig) -> None:
    """Raise `ConfigError` with every file, folder and column that a run would miss; loads no weights."""
    if findings := list(_absent(config)):
        raise ConfigError("; ".join(findings))
    rewards = config.rewards if isinstance(config, Config) else ()
    evaluated = evaluation_of(config).evaluation.rewards
    parts = [
        ("rewards", rewards),
        ("evaluation.rewards" if config.evaluation.rewards else "rewards", evaluated),
    ]
    for (place, data), (at, listed) in zip(_data(config), parts, strict=True):
        if data and (findings := list(_columns(place, data, at, listed))):
            raise ConfigError("; ".join(findings))


def _data(config: Config | EvaluateConfig) -> list[tuple[str, Piece | None]]:
    trained = config.data if isinstance(config, Config) else None
    return [("data", trained), ("evaluation.data", config.evaluation.data)]


def _absent(config: Config | EvaluateConfig) -> Iterator[str]:
    """Describe the files and folders that are named but do not exist here."""
    for option in ("model", "adapter"):
        name = config.policy.options.get(option)
        if isinstance(name, str) and name and _is_local(name) and not Path(name).exists():
            yield f"policy.{option} is '{name}', which does not exist here; name a folder, or OWNER/NAME"
    for place, data in _data(config):
        for option in ("path", "root"):
            named = data.options.get(option) if data else None
            if isinstance(named, str) and named and not objects.is_object(named) and not Path(named).exists():
                yield f"{place}.{option} is '{named}', which does not exist here; set {place}.{option}=..."


def _is_local(name: str) -> bool:
    """Return whether a model can only be a local folder: a name on the hub is `owner/name`."""
    path = Path(name)
    if objects.is_object(name):
        return False
    # Of two parts, the first of which is a folder here, is not a name on the hub either.
    return (
        path.is_absolute()
        or name[0] in ".~"
        or len(path.parts) > 2
        or path.parts[0] != name
        and path.parent.is_dir()
    )


def _columns(place: str, data: Piece, at: str, rewards: tuple[Piece, ...]) -> Iterator[str]:
    """Describe columns that rewards of TRL's form or the template of the prompt read, and no row has."""
    options, takes = data.options, find("data", data.name).options
    if "columns" not in takes:  # then rows become columns of prompts as they are, renamed by that option
        return
    columns = _first_columns(options)
    if not columns:
        return
    known = columns | set(options.get("columns") or ())
    lacks = f"that the first rows of {place} do not have; they have {', '.join(sorted(known))}"
    for i, piece in enumerate(rewards):
        for name in _required(piece):
            if name not in known:
                yield f"{at}[{i}]: '{piece.name}' takes the column '{name}' {lacks}"
    template = options.get("prompt", getattr(takes.get("prompt"), "default", ""))
    for _, field, _, _ in Formatter().parse(template if isinstance(template, str) else ""):
        name = (field or "").partition(".")[0].partition("[")[0]
        if name and name not in known:
            yield f"{place}.prompt reads the column '{name}' {lacks}"


def _first_columns(options: Mapping[str, Any]) -> set[str]:
    """Read the names of the columns of the first rows; none where they cannot be read here."""
    path = Path(str(options.get("path", "")))
    if not path.is_dir() and path.suffix not in FORMS:
        return set()
    try:
        rows = islice(Rows(path, Path(options.get("root") or path.parent)).valid(), FIRST)
        return {name for row in rows for name in row.columns}
    except (RowError, OSError):  # what is wrong with rows `mmrl data check` says in full
        return set()


def _required(piece: Piece) -> list[str]:
    """List the columns that a reward of TRL's form takes by name and cannot do without."""
    target = inspect.unwrap(find("reward", piece.name).target)
    if not is_trl(target):
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(target).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name not in OFFERED
    ]
