"""Reading of predictions files, and comparison of two evaluations answer by answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.loading import nearest
from mmrl.config.schema import ConfigError
from mmrl.core.reward_table import EQUAL
from mmrl.data.dataset_io import SHARD, SourceError, parquet_of
from mmrl.reporting.answers import CORRECT, PREDICTIONS, check_row, evaluation_file, parts_of
from mmrl.reporting.intervals import paired_interval

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Predictions:
    """The answers of one evaluation."""

    path: Path
    rows: Sequence[Row]  # each row maps columns to values
    judge: str  # reward that decides the column `correct`; "" without this column

    @property
    def rewards(self) -> list[str]:
        """Names of the columns with one reward each, such as `reward/short_answer`."""
        return [name for name in self.rows[0] if name.startswith("reward/")]

    @property
    def measures(self) -> list[str]:
        """Columns by which answers can be ranked: the judge, the other rewards, and their weighted sum."""
        first = f"reward/{self.judge}"
        names = [first, *(name for name in self.rewards if name != first)] if self.judge else self.rewards
        return names if len(names) == 1 else [*names, "reward"]


def find_predictions(path: Path) -> Path:
    """Return the predictions file of a path: a file, or the folder of an evaluation or a training run.

    For a training run, the file belongs to the last evaluation. ConfigError if there is no file, or several.
    """
    if path.suffix == ".parquet":
        return path.with_name(SHARD.sub("", path.stem) + path.suffix)
    folder = path if path.name == PREDICTIONS else path / PREDICTIONS
    stems = {SHARD.sub("", file.stem) for file in folder.glob("*.parquet")}
    files = [folder / f"{stem}.parquet" for stem in sorted(stems)]
    if all(re.fullmatch(r"step-\d+", file.stem) for file in files):
        files = files[-1:]
    evaluation = evaluation_file(path)
    files = [*([evaluation] if parts_of(evaluation) else []), *files]
    if not files:
        raise ConfigError(
            f"there are no predictions in '{path}'; name the output_dir of `mmrl evaluate` or of a training "
            "run with evaluations, or one of their parquet files"
        )
    if len(files) > 1:
        listed = ", ".join(f"'{file}'" for file in files)
        raise ConfigError(f"'{path}' holds several files of predictions; name one of {listed}")
    return files[0]


def read_predictions(path: Path) -> Predictions:
    """Read a predictions file, or all files if several processes wrote one each.

    Raises ConfigError if a file is missing, empty or damaged, or a column has a wrong type.
    """
    parts, rows, judge = parts_of(path), [], ""
    many = int(parts[0].stem[-5:]) if parts and SHARD.search(parts[0].stem) else 1
    if not parts or len(parts) < many:
        there = f"{len(parts)} of {many} files are there" if parts else "there is no such file"
        raise SourceError(f"cannot read the predictions '{path}': {there}")
    for part in parts:
        with parquet_of(part) as file:
            judge = (file.schema_arrow.metadata or {}).get(CORRECT, b"").decode()
            for i, row in enumerate(file.read().to_pylist()):
                check_row(row, f"{part}[{i}]", ("uid", "prompt"))
                rows.append({"reward": math.nan, **row})
    if not rows:
        raise SourceError(f"'{path}' holds no rows")
    return Predictions(path, rows, judge if f"reward/{judge}" in rows[0] else "")


# ---- two evaluations


@dataclass(frozen=True)
class Joined:
    """Two evaluations joined on the uids of their prompts, or on their contents if `note` says so."""

    first: Predictions
    second: Predictions
    measures: Sequence[str]  # shared columns; the first one orders the rows
    pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]]  # both evaluations' answers per shared prompt
    only_first: int  # number of prompts only in `first`
    only_second: int
    other_targets: int  # number of prompts left out because their targets differ
    other_words: int  # number of pairs whose prompt texts differ
    note: str = ""  # why prompts were not joined on uids


@dataclass(frozen=True)
class Change:
    """Change of one measure between two evaluations, over the prompts in both."""

    name: str
    before: float  # mean in the first evaluation
    after: float
    better: int  # number of prompts that got better
    worse: int
    unchanged: int
    low: float = math.nan  # interval of the mean paired difference over prompts
    high: float = math.nan

    @property
    def p(self) -> float:
        """Two-sided p-value of the exact sign test (McNemar's test for one answer of 0 or 1 per prompt).

        Null hypothesis: a prompt that changed got better or worse with equal probability.
        """
        changed, fewer = self.better + self.worse, min(self.better, self.worse)
        tail = sum(math.comb(changed, k) for k in range(fewer + 1))
        return min(1.0, 2 * tail / 2**changed)  # exact integers: no overflow


def join(first: Predictions, second: Predictions, by: str | None = None) -> Joined:
    """Join two evaluations on the uids of their prompts; `by` names the reward to order by.

    Raises ConfigError if the evaluations share no prompt or no reward.
    """
    own, second = second, aligned(first, second)
    same = check_same_prompts(first, second)
    measures = [name for name in second.measures if name in first.measures]
    if not measures:
        raise ConfigError(no_reward_of_both(first, second))
    chosen = [name for name in measures if by in (None, name, name.removeprefix("reward/"))]
    if not chosen:
        names = [name.removeprefix("reward/") for name in measures]
        raise ConfigError(
            f"no reward of both is called '{by}'; {nearest(by or '', names) or f'there are {names}'}"
        )
    measures = list(dict.fromkeys([chosen[0], *measures]))
    before, after = by_prompt(first), by_prompt(second)
    shared = before.keys() & after.keys()
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
        note=""
        if own is second
        else f"{no_uid(first, own)}: prompts of equal text, target and media are one",
    )


def aligned(first: Predictions, second: Predictions) -> Predictions:
    """If no uid is in both, name prompts of `second` as those of `first` with equal text, target and media.

    Prompts whose content occurs twice keep their uids.
    """
    if by_prompt(first).keys() & by_prompt(second).keys():
        return second
    for column in ("media", "inputs"):  # names, or hashes for media inside rows
        mine, theirs = (_by_content(one, column) for one in (first, second))
        if names := {theirs[content]: mine[content] for content in mine.keys() & theirs.keys()}:
            return replace(
                second, rows=[{**row, "uid": names.get(row["uid"], row["uid"])} for row in second.rows]
            )
    return second


def _by_content(predictions: Predictions, column: str) -> dict[tuple, str]:
    uids: dict[tuple, list[str]] = {}
    for uid, (row, *_) in by_prompt(predictions).items():
        media = uid if row.get(column) is None else row[column]
        media = media.split()[1:] if column == "inputs" and media is not uid else media  # "tokens media"
        uids.setdefault((row["prompt"], row.get("target"), str(media)), []).append(uid)
    return {content: same[0] for content, same in uids.items() if len(same) == 1}


def no_uid(first: Predictions, second: Predictions) -> str:
    """Say that no uid is in both evaluations, and why."""
    one, other = (predictions.rows[0]["uid"] for predictions in (first, second))
    why = "rows without an `id` are named after their file and number"
    return f"no uid is in both (the first are '{one}' and '{other}'; {why})"


def check_same_prompts(first: Predictions, second: Predictions) -> list[str]:
    """List the uids with equal targets in both evaluations; raise ConfigError if there are none."""
    before, after = by_prompt(first), by_prompt(second)
    shared = [uid for uid in before if uid in after]
    same = [uid for uid in shared if before[uid][0].get("target") == after[uid][0].get("target")]
    if not same:
        why = f"{no_uid(first, second)}; evaluate both on one file, or give its rows an `id`"
        why = "their targets differ" if shared else why
        raise ConfigError(f"'{first.path}' and '{second.path}' have no prompt in common: {why}")
    return same


def no_reward_of_both(first: Predictions, second: Predictions) -> str:
    """Return the error text for two evaluations that have no reward in common."""
    return (
        f"'{first.path}' has {', '.join(first.rewards) or 'no rewards'} and '{second.path}' "
        f"{', '.join(second.rewards) or 'none'}, so nothing can be compared; measure both with one reward"
    )


def by_prompt(predictions: Predictions) -> dict[str, list[Row]]:
    """Group answers by the uid of their prompt."""
    groups: dict[str, list[Row]] = {}
    for row in predictions.rows:
        groups.setdefault(row["uid"], []).append(row)
    return groups


def value_of(rows: Sequence[Row], measure: str) -> float:
    """Return the mean of a measure over the answers to a prompt; NaN if no answer has a value."""
    values = [float(v) for row in rows if (v := row.get(measure)) is not None and math.isfinite(v)]
    return sum(values) / len(values) if values else math.nan


def change_of(joined: Joined, measure: str) -> Change:
    """Compute the paired change of a measure over shared prompts, with a bootstrap interval."""
    values = [(value_of(a, measure), value_of(b, measure)) for a, b in joined.pairs]
    values = [(a, b) for a, b in values if math.isfinite(a) and math.isfinite(b)]
    gaps, count = [b - a for a, b in values], max(len(values), 1)
    better, worse = sum(gap > EQUAL for gap in gaps), sum(gap < -EQUAL for gap in gaps)
    before, after = (sum(pair[side] for pair in values) / count for side in (0, 1))
    _, low, high = paired_interval([[0.0] * len(gaps)], [gaps])
    return Change(measure, before, after, better, worse, len(gaps) - better - worse, low, high)
