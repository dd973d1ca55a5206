"""Parquet files of answers: completions of training steps and predictions of evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from mmrl.config.schema import ConfigError
from mmrl.core.plain_text import each_text, whole
from mmrl.core.protocols import RendersPrompts
from mmrl.core.reward_table import Measured, RewardTable
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.data.fields import short
from mmrl.reporting.thumbnails import of_outcome, of_prompt, of_tools, sound_of_prompt
from mmrl.runtime.files import remove, replacing

PREDICTIONS = "predictions"  # file stem of a single evaluation, or folder of several evaluations
IMAGES = 8  # number of prompts per training step that get thumbnails
THUMBNAILS = 512  # number of prompts that get thumbnails in `mmrl evaluate`
CORRECT = b"correct"  # metadata key of the reward name on which the column `correct` is based
TEXT, NUMBER, JPEG = (str, "text"), ((int, float), "number"), (bytes, "JPEG")
# Types of the columns; `reward/NAME` is a number, other columns are logged values of any type.
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("uid", "prompt", "target", "completion", "split", "rendered", "inputs"), TEXT),
    **dict.fromkeys(("length", "reward", "on_policy", "advantage"), NUMBER),
    **dict.fromkeys(("seen", "made"), JPEG),
    "heard": (bytes, "WAV"),
    "correct": (bool, "truth value"),
    "media": (list, "list"),
    "shown": (list, "list"),
}


def keeps_images(step: int, max_steps: int, num: int) -> bool:
    """Whether the completions of a step are stored with thumbnails: true for `num` evenly spaced steps."""
    return step in {round(i * (max_steps - 1) / max(num - 1, 1)) for i in range(num)}


def write_completions(
    path: Path, rollouts: Rollouts, table: RewardTable, advantage: Sequence[float], *, images: bool = False
) -> None:
    """Write the rollouts of this process atomically to a parquet file, one row per rollout.

    Args:
        path: File to write.
        rollouts: Rollouts of this process.
        table: Rewards of the rollouts of all processes.
        advantage: Advantage of each row at its last outcome.
        images: Whether rows of the first prompts get thumbnails of the prompt (`seen`), the answer (`made`)
            and the images from tools (`shown`).
    """
    columns = columns_of(rollouts, table)
    columns["on_policy"] = [row.on_policy for row in rollouts]
    columns["advantage"] = list(advantage)
    uids = list(dict.fromkeys(row.prompt.uid for row in rollouts))
    write_columns(path, columns | thumbnails(rollouts, set(uids[:IMAGES] if images else ())))


def write_predictions(
    path: Path,
    measured: Measured,
    *,
    world: int = 1,
    images: int = IMAGES,
    notes: Collection[str] = (),
    policy: Any = None,
) -> None:
    """Write the answers of an evaluation atomically to a parquet file, one row per answer.

    With several processes, each one writes its own file, e.g. `predictions-00000-of-00002.parquet`. The
    column `correct` is based on the reward that `judge_of` returns, whose name is stored in the file's
    metadata. Without such a reward, there is no column `correct`.

    Args:
        path: Path of the file if there is one process.
        measured: The evaluation on all processes.
        world: Number of processes.
        images: Number of prompts whose rows get thumbnails of the prompt (`seen`), the answer (`made`) and
            the images from tools (`shown`): the prompts with the lowest rewards.
        notes: Names of the engine's per-step values to write, as columns `note/NAME`.
        policy: If it renders prompts, the columns `rendered` (text as the model reads it) and `inputs` (hash
            of token ids and media tensors) are written.
    """
    table, rollouts = measured.table, measured.rollouts
    own, rank = path, table.rank
    if world > 1:
        own = path.with_name(f"{path.stem}-{rank:05d}-of-{world:05d}{path.suffix}")
    columns, judge = columns_of(rollouts, table), judge_of(table, measured.correct)
    columns["split"] = [row.prompt.split for row in rollouts]
    columns["media"] = [[medium.name for medium in row.prompt.media] for row in rollouts]
    columns |= {f"note/{name}": [row.notes[name].tolist() for row in rollouts] for name in sorted(notes)}
    if isinstance(policy, RendersPrompts):
        columns["rendered"] = [policy.render(row.prompt) for row in rollouts]
        columns["inputs"] = [policy.input_hash(row.prompt) for row in rollouts]
    rank_by = columns["reward"]
    if judge:
        judged = columns[f"reward/{judge}"]
        columns["correct"] = [None if math.isnan(value) else value == 1 for value in judged]
        rank_by = judged
    order = sorted(range(len(rollouts)), key=lambda i: (math.isnan(rank_by[i]), rank_by[i]))
    worst = list(dict.fromkeys(rollouts[i].prompt.uid for i in order))[:images]
    write_columns(own, columns | thumbnails(rollouts, set(worst)), {CORRECT: judge.encode()} if judge else {})
    if rank == 0:
        for old in parts_of(path):  # files of an earlier run with more processes
            if old != own and not old.stem.endswith(f"-of-{world:05d}"):
                remove(old)


def evaluation_file(folder: Path) -> Path:
    """Return the path of the predictions file in the output folder of an evaluation."""
    return folder / f"{PREDICTIONS}.parquet"


def step_file(folder: Path, step: int) -> Path:
    """Return the path of the predictions file for the evaluation after `step` steps of a training run."""
    return folder / PREDICTIONS / f"step-{step:06d}.parquet"


def setting_file(folder: Path, setting: str) -> Path:
    """Return the path of the predictions file for one of several settings; `/` in its name becomes `%2F`."""
    return folder / PREDICTIONS / f"{quote(setting, safe=' +=,@()')}.parquet"


def drop_predictions(folder: Path, step: int) -> None:
    """Remove the predictions files after `step`, which a resumed run writes again."""
    for path in (folder / PREDICTIONS).glob("step-*.parquet"):
        number = path.stem.split("-")[1]
        if number.isdecimal() and int(number) > step:
            remove(path)


def parts_of(path: Path) -> list[Path]:
    """List the existing files for a predictions path: the file itself, or one file per process."""
    return sorted(
        part for part in (path, *path.parent.glob(f"{path.stem}-*-of-*{path.suffix}")) if part.is_file()
    )


def judge_of(table: RewardTable, chosen: str = "") -> str:
    """Return the name of the 0/1 reward that marks correct answers; "" if there is none.

    All values of this reward must be 0 or 1. It is the `chosen` reward, or else the first such reward among
    those with the largest weight. Rewards with a smaller weight, such as format or length, do not count.
    """
    weights = {name: abs(table.weights.get(name, 0.0)) for name in table.scored}
    most = max(weights.values(), default=0.0)
    for name in [chosen] if chosen else [name for name, weight in weights.items() if weight == most]:
        values = table.at_end(name)
        values = values[~values.isnan()]
        if len(values) and bool(((values == 0) | (values == 1)).all()):
            return name
    return ""


def columns_of(rollouts: Rollouts, table: RewardTable) -> dict[str, list]:
    """Return parquet columns with prompts, targets, answers, rewards and logged values of this process."""
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
        values = [row.logged.get(name) for row in rollouts]
        # One type per parquet column: float if all values are numbers, else text.
        as_type = float if all(value is None or isinstance(value, int | float) for value in values) else str
        taken = name in columns or name in TYPES
        columns[f"extra/{name}" if taken else name] = [v if v is None else as_type(v) for v in values]
    return columns


def thumbnails(rollouts: Rollouts, uids: set[str]) -> dict[str, list]:
    """Return columns with thumbnails of prompts (`seen`), answers (`made`) and tool images (`shown`).

    The column `heard` has the sounds of prompts. Rows whose prompt is not in `uids` have None. A column
    with None only is left out.
    """
    prompts = {row.prompt.uid: row.prompt for row in rollouts if row.prompt.uid in uids}
    of_prompts = {uid: of_prompt(prompt) for uid, prompt in prompts.items()}
    of_sounds = {uid: sound_of_prompt(prompt) for uid, prompt in prompts.items()}
    inside = [row.prompt.uid in uids for row in rollouts]
    columns = {
        "seen": [of_prompts.get(row.prompt.uid) for row in rollouts],
        "heard": [of_sounds.get(row.prompt.uid) for row in rollouts],
        "made": [of_outcome(r.outcomes[-1]) if i else None for r, i in zip(rollouts, inside, strict=True)],
        "shown": [of_tools(row.shown) if i else None for row, i in zip(rollouts, inside, strict=True)],
    }
    return {name: column for name, column in columns.items() if any(column)}


def target_text(target: Any) -> str | None:
    """Convert a target to text: texts stay as they are, anything else becomes JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        return vars(value) if is_dataclass(value) else str(value)

    unchanged = target is None or isinstance(target, str)
    return target if unchanged else json.dumps(target, default=plain, ensure_ascii=False)


def check_row(row: Mapping[str, Any], place: str, required: Sequence[str]) -> None:
    """Raise ConfigError if a required column is missing or a column has the wrong type."""
    for name, value in {**dict.fromkeys(required), **row}.items():
        check_type(name, value, place, optional=name not in required)
    for image in row.get("shown") or ():
        check_type("shown", image, place, JPEG)


def check_type(
    name: str, value: Any, place: str, wanted: tuple[Any, str] | None = None, *, optional: bool = False
) -> None:
    """Raise ConfigError unless a value has the type `wanted`, by default the type of its column `name`."""
    wanted = wanted or TYPES.get(name, NUMBER if name.startswith("reward/") else (object, ""))
    if not isinstance(value, wanted[0]) and not (optional and value is None):
        raise ConfigError(f"{place}: '{name}' must be a {wanted[1]}, not {short(value)}")


def write_columns(
    path: Path, columns: Mapping[str, list], metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Write columns as a parquet file, atomically."""
    import pyarrow
    from pyarrow import parquet

    # Explicit types for columns whose values may all be None.
    types = {"target": pyarrow.string(), "completion": pyarrow.string(), "correct": pyarrow.bool_()}
    types |= {"media": pyarrow.list_(pyarrow.string())}
    columns = each_text(columns, whole)  # file names may not be UTF-8
    arrays = {name: pyarrow.array(column, types.get(name)) for name, column in columns.items()}
    with replacing(path) as beside:
        parquet.write_table(pyarrow.table(arrays).replace_schema_metadata(metadata), beside)


def trajectory_of(prompt: Prompt, row: Mapping[str, Any]) -> Trajectory:
    """Convert a stored answer to a rollout; raise ConfigError if the answer is not a text."""
    text = row.get("completion")
    if text is None:
        raise ConfigError("answers that are no texts are not stored in full")
    notes = {
        name.removeprefix("note/"): torch.tensor(values)
        for name, values in row.items()
        if name.startswith("note/")
    }
    return Trajectory(prompt, prompt.uid, (Outcome(text),), None, int(row["length"]), notes)
