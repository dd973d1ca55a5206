"""Answers as parquet: completions of training steps, and predictions of evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from mmrl.core.plain_text import each_text, whole
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.types import Rollouts
from mmrl.reporting.thumbnails import of_outcome, of_prompt, of_tools
from mmrl.runtime.files import remove, replacing

PREDICTIONS = "predictions"  # the file of an evaluation, or the folder of several
IMAGES = 8  # prompts of a collection that keep thumbnails
THUMBNAILS = 512  # prompts of `mmrl evaluate` that do
# Columns of some files.
LATER = ("on_policy", "advantage", "split", "media", "correct", "seen", "made", "shown")
CORRECT = b"correct"  # in the metadata of a file: the reward that its column `correct` was read from


def keeps_images(step: int, max_steps: int, num: int) -> bool:
    """Return whether the completions of a step keep thumbnails: `num` steps do, spread from first to last."""
    return step in {round(i * (max_steps - 1) / max(num - 1, 1)) for i in range(num)}


def write_completions(
    path: Path, rollouts: Rollouts, table: RewardTable, advantage: Sequence[float], *, images: bool = False
) -> None:
    """Write the rollouts of this process as parquet, one row each, whole or not at all.

    Args:
        path: File to write.
        rollouts: Rollouts of this process.
        table: Their rewards; rows of other processes are left out.
        advantage: Advantage of each row at its last place.
        images: Whether rows of the first prompts keep thumbnails of the prompt (`seen`), the answer
            (`made`) and what tools showed (`shown`).
    """
    columns = columns_of(rollouts, table)
    columns["on_policy"] = [row.on_policy for row in rollouts]
    columns["advantage"] = list(advantage)
    uids = list(dict.fromkeys(row.prompt.uid for row in rollouts))
    write_columns(path, columns | thumbnails(rollouts, set(uids[:IMAGES] if images else ())))


def write_predictions(path: Path, measured: Measured, *, world: int = 1, images: int = IMAGES) -> None:
    """Write the answers of an evaluation as parquet, one row each, whole or not at all.

    Of several processes each writes its own rows, as `predictions-00000-of-00002.parquet`.

    The column `correct` is read from the reward that `judge_of` names; the metadata of the file name it under
    the key `correct`. Without such a reward there is no such column.

    Args:
        path: The file of an evaluation on one process.
        measured: The evaluation; rows of other processes are left out.
        world: The number of processes.
        images: Prompts with the lowest rewards whose rows keep thumbnails of the prompt (`seen`), the answer
            (`made`) and what tools showed (`shown`).
    """
    table, rollouts = measured.table, measured.rollouts
    own, rank = path, table.rank
    if world > 1:
        own = path.with_name(f"{path.stem}-{rank:05d}-of-{world:05d}{path.suffix}")
    columns, judge = columns_of(rollouts, table), judge_of(table, measured.correct)
    columns["split"] = [row.prompt.split for row in rollouts]
    columns["media"] = [[medium.name for medium in row.prompt.media] for row in rollouts]
    rank_by = columns["reward"]
    if judge:
        judged = columns[f"reward/{judge}"]
        columns["correct"] = [None if math.isnan(value) else value == 1 for value in judged]
        rank_by = judged
    order = sorted(range(len(rollouts)), key=lambda i: (math.isnan(rank_by[i]), rank_by[i]))
    worst = list(dict.fromkeys(rollouts[i].prompt.uid for i in order))[:images]
    write_columns(own, columns | thumbnails(rollouts, set(worst)), {CORRECT: judge.encode()} if judge else {})
    if rank == 0:
        for old in parts_of(path):  # of another number of processes, which would count rows twice
            if old != own and not old.stem.endswith(f"-of-{world:05d}"):
                remove(old)


def evaluation_file(folder: Path) -> Path:
    """Name the predictions of an evaluation in its output folder."""
    return folder / f"{PREDICTIONS}.parquet"


def step_file(folder: Path, step: int) -> Path:
    """Name the predictions of a training run's evaluation after `step` steps."""
    return folder / PREDICTIONS / f"step-{step:06d}.parquet"


def setting_file(folder: Path, setting: str) -> Path:
    """Name the predictions of a setting, of an evaluation of several; `/` is written as `%2F`."""
    return folder / PREDICTIONS / f"{quote(setting, safe=' +=,@()')}.parquet"


def drop_predictions(folder: Path, step: int) -> None:
    """Remove the predictions of a training run after `step`, which are made once more."""
    for path in (folder / PREDICTIONS).glob("step-*.parquet"):
        number = path.stem.split("-")[1]
        if number.isdecimal() and int(number) > step:
            remove(path)


def parts_of(path: Path) -> list[Path]:
    """List the files that hold the rows of a file of predictions: itself, or those of several processes."""
    return sorted(
        part for part in (path, *path.parent.glob(f"{path.stem}-*-of-*{path.suffix}")) if part.is_file()
    )


def judge_of(table: RewardTable, chosen: str = "") -> str:
    """Name the reward that says which answers are correct: 1 is correct, and all values are 0 or 1.

    That is the `chosen` one, or the reward of the largest weight; of several, the first whose values are only
    0 and 1. A smaller reward, such as of form or length, says nothing of that: "" where there is none.
    """
    weights = {name: abs(table.weights.get(name, 0.0)) for name in table.scored}
    most = max(weights.values(), default=0.0)
    for name in [chosen] if chosen else [name for name, weight in weights.items() if weight == most]:
        values = table.at_end(name)
        known = values[~values.isnan()]
        if len(known) and bool(((known == 0) | (known == 1)).all()):
            return name
    return ""


def columns_of(rollouts: Rollouts, table: RewardTable) -> dict[str, list]:
    """List prompts, targets, answers and rewards of this process's rollouts, one column each."""
    mine = table.select(table.mine)
    columns: dict[str, list] = {
        "uid": [row.prompt.uid for row in rollouts],
        "prompt": [row.prompt.text for row in rollouts],
        "target": [target_text(row.prompt.target) for row in rollouts],
        "completion": [row.outcomes[-1].text for row in rollouts],
        "length": [row.length for row in rollouts],
        "reward": mine.reward().tolist() if mine.names else [math.nan] * len(mine),
    }
    columns |= {f"reward/{name}": mine.at_end(name).tolist() for name in mine.scored}
    for name in dict.fromkeys(name for row in rollouts for name in row.logged):
        logged = [row.logged.get(name) for row in rollouts]
        taken = name in columns or name in LATER
        columns[f"extra/{name}" if taken else name] = _of_one_type(logged)
    return columns


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return numbers as floats; where a value is none, all become texts. None stays."""
    numbers = all(value is None or isinstance(value, int | float) for value in values)
    return [None if value is None else float(value) if numbers else str(value) for value in values]


def thumbnails(rollouts: Rollouts, uids: set[str]) -> dict[str, list]:
    """Make thumbnails for some uids, None elsewhere: of prompts, answers, and what tools showed.

    The columns are `seen`, `made` and `shown`.
    """
    prompts = {row.prompt.uid: row.prompt for row in rollouts if row.prompt.uid in uids}
    shown = {uid: of_prompt(prompt) for uid, prompt in prompts.items()}
    seen = [shown.get(row.prompt.uid) for row in rollouts]
    made = [of_outcome(row.outcomes[-1]) if row.prompt.uid in uids else None for row in rollouts]
    parts = [of_tools(row.shown) if row.prompt.uid in uids else None for row in rollouts]
    columns = {"seen": seen, "made": made, "shown": parts}
    return {name: column for name, column in columns.items() if any(column)}


def target_text(target: Any) -> str | None:
    """Write a target as text: a text as it is, anything else as JSON."""

    def plain(value: Any) -> Any:
        match value:
            case Tensor():
                return value.tolist()
        return vars(value) if is_dataclass(value) else str(value)

    match target:
        case None | str():
            return target
    return json.dumps(target, default=plain, ensure_ascii=False)


def write_columns(
    path: Path, columns: Mapping[str, list], metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Write columns as parquet under a temporary name, and rename it."""
    import pyarrow
    from pyarrow import parquet

    # Columns that may have no value in a file keep their type.
    types = {"target": pyarrow.string(), "completion": pyarrow.string(), "correct": pyarrow.bool_()}
    types |= {"media": pyarrow.list_(pyarrow.string())}
    columns = each_text(columns, whole)  # names of files may be no UTF-8
    arrays = {name: pyarrow.array(column, types.get(name)) for name, column in columns.items()}
    with replacing(path) as beside:
        parquet.write_table(pyarrow.table(arrays).replace_schema_metadata(metadata), beside)
