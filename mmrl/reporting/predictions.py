"""Predictions of evaluations: their files are read, and two of them are compared answer by answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.loading import nearest
from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import EQUAL
from mmrl.data.dataset_io import SHARD, SourceError, parquet_of
from mmrl.data.fields import short
from mmrl.reporting.answers import CORRECT, PREDICTIONS, evaluation_file, parts_of

TYPES = {"uid": str, "prompt": str, "completion": str, "target": str, "split": str, "media": list}
TYPES |= {"correct": bool, "seen": bytes, "made": bytes, "shown": list}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Predictions:
    """The answers of one evaluation; a row maps the columns of its file to values.

    `judge` is the reward that the column `correct` was read from, "" without that column.
    """

    path: Path
    rows: Sequence[Row]
    judge: str

    @property
    def rewards(self) -> list[str]:
        """The columns with single rewards, such as `reward/short_answer`."""
        return [name for name in self.rows[0] if name.startswith("reward/")]

    @property
    def measures(self) -> list[str]:
        """The columns that answers are ranked by: what decides, then single rewards, then their sum."""
        first = f"reward/{self.judge}"
        names = [first, *(name for name in self.rewards if name != first)] if self.judge else self.rewards
        return names if len(names) == 1 else [*names, "reward"]


def find_predictions(path: Path) -> Path:
    """Find the predictions that a user named: a file, or the folder of an evaluation or of a run.

    Of a training run those of its last evaluation are meant. Raises ConfigError where there are none, or
    several without an order.
    """
    if path.suffix == ".parquet":
        return path.with_name(SHARD.sub("", path.stem) + path.suffix)
    folder = path if path.name == PREDICTIONS else path / PREDICTIONS
    stems = {SHARD.sub("", file.stem) for file in folder.glob("*.parquet")}
    found = [folder / f"{stem}.parquet" for stem in sorted(stems)]
    if all(re.fullmatch(r"step-\d+", file.stem) for file in found):
        found = found[-1:]
    whole = evaluation_file(path)
    found = [*([whole] if parts_of(whole) else []), *found]
    if not found:
        raise ConfigError(
            f"there are no predictions in '{path}'; name the output_dir of `mmrl evaluate` or of a training "
            "run with evaluations, or one of their parquet files"
        )
    if len(found) > 1:
        listed = ", ".join(f"'{file}'" for file in found)
        raise ConfigError(f"'{path}' holds several files of predictions; name one of {listed}")
    return found[0]


def read_predictions(path: Path) -> Predictions:
    """Read the predictions in a file, or in those that several processes wrote instead of it.

    Raises:
        ConfigError: A file is missing, empty or damaged, or a column has another type than an evaluation
            writes.
    """
    parts, rows, judge = parts_of(path), [], ""
    many = int(parts[0].stem[-5:]) if parts and SHARD.search(parts[0].stem) else 1
    if not parts or len(parts) < many:
        there = f"{len(parts)} of {many} files are there" if parts else "there is no such file"
        raise SourceError(f"cannot read the predictions '{path}': {there}")
    for part in parts:
        with parquet_of(part) as file:
            judge = (file.schema_arrow.metadata or {}).get(CORRECT, b"").decode()
            rows += [checked(row, f"{part}[{i}]") for i, row in enumerate(file.read().to_pylist())]
    if not rows:
        raise SourceError(f"'{path}' holds no rows")
    return Predictions(path, rows, judge if f"reward/{judge}" in rows[0] else "")


def checked(row: Row, place: str) -> Row:
    """Raise ConfigError where a column is missing or has another type than an evaluation writes."""
    for name, value in {"uid": None, "prompt": None, "reward": math.nan, **row}.items():
        wanted = TYPES.get(name, (int, float) if name.startswith("reward") else object)
        if not isinstance(value, wanted) and (value is not None or name in ("uid", "prompt")):
            raise SourceError(f"{place}: '{name}' is not what an evaluation writes, but {short(value)}")
    for image in row.get("shown") or ():
        if not isinstance(image, bytes):
            raise SourceError(f"{place}: 'shown' is not what an evaluation writes, but {short(row['shown'])}")
    return {"reward": math.nan, **row}


# ---- two evaluations


@dataclass(frozen=True)
class Joined:
    """The prompts that two evaluations share, each with the answers of both, and how many they do not.

    `measures` are the columns that both have, the one to order by first.
    """

    first: Predictions
    second: Predictions
    measures: Sequence[str]
    pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]]
    only_first: int
    only_second: int
    other_targets: int  # prompts of one uid with unlike targets, which are other questions: left out
    other_words: int  # pairs whose prompts are worded differently


@dataclass(frozen=True)
class Change:
    """How one measure changed from a first evaluation to a second, over prompts that both answered."""

    name: str
    before: float
    after: float
    better: int
    worse: int
    unchanged: int

    @property
    def p(self) -> float:
        """Two-sided p-value of the exact sign test; with one answer of 0 or 1 a prompt, McNemar's test.

        Under the null hypothesis a prompt that changed got better or worse with equal probability.
        """
        changed, fewer = self.better + self.worse, min(self.better, self.worse)
        tail = sum(math.comb(changed, k) for k in range(fewer + 1))
        return min(1.0, 2 * tail / 2**changed)  # whole numbers divide exactly, however large


def join(first: Predictions, second: Predictions, by: str | None = None) -> Joined:
    """Join two evaluations on the uid of their prompts, to be ordered by a reward.

    Raises ConfigError where they share no prompt or no reward.
    """
    measures = [name for name in second.measures if name in first.measures]
    if not measures:
        raise ConfigError(
            f"'{first.path}' has {', '.join(first.rewards) or 'no rewards'} and '{second.path}' "
            f"{', '.join(second.rewards) or 'none'}, so nothing can be compared; measure both with one reward"
        )
    chosen = [name for name in measures if by in (None, name, name.removeprefix("reward/"))]
    if not chosen:
        names = [name.removeprefix("reward/") for name in measures]
        raise ConfigError(
            f"no reward of both is called '{by}'; {nearest(by or '', names) or f'there are {names}'}"
        )
    measures = list(dict.fromkeys([chosen[0], *measures]))
    before, after = by_prompt(first), by_prompt(second)
    shared = [uid for uid in before if uid in after]
    same = [uid for uid in shared if before[uid][0].get("target") == after[uid][0].get("target")]
    if not same:
        why = "their targets differ" if shared else "no uid is in both"
        raise ConfigError(f"'{first.path}' and '{second.path}' have no prompt in common: {why}")
    pairs = [(before[uid], after[uid]) for uid in same]
    return Joined(
        first,
        second,
        measures,
        pairs,
        only_first=len(before) - len(shared),
        only_second=len(after) - len(shared),
        other_targets=len(shared) - len(same),
        other_words=sum(a[0]["prompt"] != b[0]["prompt"] for a, b in pairs),
    )


def by_prompt(predictions: Predictions) -> dict[str, list[Row]]:
    """Group answers by the uid of their prompt."""
    groups: dict[str, list[Row]] = {}
    for row in predictions.rows:
        groups.setdefault(row["uid"], []).append(row)
    return groups


def value_of(rows: Sequence[Row], measure: str) -> float:
    """Average a measure over the answers to a prompt; NaN where none has it."""
    known = [float(v) for row in rows if (v := row.get(measure)) is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def change_of(joined: Joined, measure: str) -> Change:
    """Compare two evaluations by a measure, over prompts where both have it."""
    values = [(value_of(a, measure), value_of(b, measure)) for a, b in joined.pairs]
    values = [(a, b) for a, b in values if math.isfinite(a) and math.isfinite(b)]
    gaps, count = [b - a for a, b in values], max(len(values), 1)
    better, worse = sum(gap > EQUAL for gap in gaps), sum(gap < -EQUAL for gap in gaps)
    before, after = (sum(pair[side] for pair in values) / count for side in (0, 1))
    return Change(measure, before, after, better, worse, len(gaps) - better - worse)
