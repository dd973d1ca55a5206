"""The record of a multi-stage run: its finished stages and their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.loading import ConfigError
from mmrl.config.schema import convert
from mmrl.runtime.files import write_whole

RECORD = "stages.json"  # in the output folder, beside one folder per stage


@dataclass(frozen=True)
class StageRecord:
    """The record of one stage of a run.

    Args:
        name: Name of the stage.
        folder: Name of the stage's folder.
        checkpoint: Checkpoint that later stages begin from; empty until the stage is finished.
        step: Number of training steps of the stage.
        length: Values of the configuration keys that determined the number of steps.
        metrics: Metrics of the checkpoint's evaluation, if any, without timings.
    """

    name: str
    folder: str
    checkpoint: str = ""
    step: int = 0
    length: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_stages(home: Path) -> list[StageRecord]:
    """Read the stage records in an output folder; return [] for a folder without stages."""
    path = home / RECORD
    if not path.exists():
        return []
    try:
        return [convert(stage, StageRecord, RECORD) for stage in json.loads(path.read_text())["stages"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"'{path}' is broken: {error}; put it back, or name another output_dir") from error


def write_stages(home: Path, records: Sequence[StageRecord]) -> None:
    """Write the stage records into an output folder atomically."""
    write_whole(home / RECORD, json.dumps({"stages": [asdict(record) for record in records]}, indent=2))


def last_finished(home: Path) -> Path | None:
    """Return the checkpoint of the last finished stage; None for a folder without stages.

    Raises `ConfigError` if no stage is finished.
    """
    records = read_stages(home)
    finished = [record for record in records if record.checkpoint]
    if records and not finished:
        names = ", ".join(record.folder for record in records)
        raise ConfigError(f"'{home}' holds the stages {names}, and none is finished; name the folder of one")
    return home / finished[-1].folder / finished[-1].checkpoint if finished else None


def begun(home: Path) -> list[Path]:
    """List the folders of stages with at least one finished step."""
    folders = [home / record.folder for record in read_stages(home)]
    return [folder for folder in folders if (folder / "metrics.jsonl").exists()]


def check_alone(folder: Path) -> None:
    """Raise `ConfigError` if the output folder of a single run contains a multi-stage run."""
    if records := read_stages(folder):
        raise ConfigError(
            f"'{folder}' holds the stages {', '.join(record.folder for record in records)}; name another "
            "output_dir"
        )
