"""Metrics of a training step with TRL's names, and the JSON files that store them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.episodes import join_episodes
from mmrl.core.protocols import Tracker
from mmrl.core.reward_table import EQUAL, Measured, RewardTable, name_id
from mmrl.core.tensor import group_count, group_index, group_mean, group_range, group_std, group_sum
from mmrl.core.types import VERSION, Rollouts
from mmrl.runtime.files import flush, write_whole

log = logging.getLogger("mmrl")

EVALUATION = "evaluation.json"  # file with the metrics of a run's last evaluation
VISUALIZATIONS = "visualizations.html"  # HTML fragments: visualizations of the last evaluation


def describe_rewards(table: RewardTable) -> dict[str, float]:
    """Compute the reward metrics of a training step over the episodes that the policy sampled."""
    table = on_policy_rows(join_episodes(table))
    if len(table) and not table.scored:  # supervised training without rewards
        return {}
    index = group_index([table.group])  # (rows,) index of each row's group
    # In a group with a failed reward the total is NaN, not the sum of the other rewards.
    reward = torch.where(table.valid.any(1).any(-1), table.reward(), torch.nan)
    valid = ~reward.isnan()  # (rows,)
    extent = group_range(reward, index, valid)
    mean, std = mean_and_std(reward)
    flat = float((extent[valid] < EQUAL).double().mean())
    metrics = {"reward": mean, "reward_std": std, "frac_reward_zero_std": flat}
    for name in table.scored:
        key, answers = f"rewards/{name}", table.at_end(name)
        metrics[f"{key}/mean"], metrics[f"{key}/std"] = mean_and_std(answers)
        valid = ~answers.isnan()
        several = valid & (group_count(index, valid) > 1)
        # Average over groups: each group with at least two values has the same weight.
        spread, share = group_std(answers.nan_to_num(), index, valid), 1 / group_count(index, several)
        spread = torch.where(spread > EQUAL, spread, 0.0)
        total = share[several].sum()
        metrics[f"{key}/group_std"] = float((spread * share)[several].sum() / total) if several.any() else 0.0
        if f"fault/{name}" in table.ids:
            metrics[f"{key}/error_rate"] = float(table.ids[f"fault/{name}"][table.present].double().mean())
    return metrics


def on_policy_rows(table: RewardTable) -> RewardTable:
    """Select the rows that the policy sampled, or all rows if it sampled none."""
    sampled = table.ids["on_policy"][:, 0] == 1
    return table.select(sampled) if sampled.any() else table


def mean_and_std(values: Tensor) -> tuple[float, float]:
    """Return mean (NaN if empty) and standard deviation (0 for one value or none), ignoring NaN."""
    valid = values[~values.isnan()]
    return float(valid.mean()), float(valid.std()) if len(valid) > 1 else 0.0


def describe_shares(table: RewardTable, credit: RewardTable) -> dict[str, float]:
    """Compute each weighted reward's share of the advantage, as `rewards/{name}/advantage_share`.

    For each row, let `d_k` be weight times reward `k` minus its group mean, `d` the sum of `d_k` over `k`,
    and `a` the advantage (mean over positions) minus its group mean. Let `c` be the slope of `a` on `d`
    inside the group. The share of reward `k` is the sum of `c * a * d_k` over all rows, divided by the sum of
    `c * a * d`. This is the fraction that `k` contributes to the explained variance within groups. Shares
    add up to 1; a reward with a negative share works against the other rewards. Our reading.

    Args:
        table: Rewards of a training step.
        credit: Advantages of these rows; rows without an advantage are left out.

    Returns:
        The share of every weighted reward; empty if no rewards differ within a group.
    """
    table = table.select(torch.isin(table.ids["row"][:, 0], credit.ids["row"][:, 0]))
    table, credit = join_episodes(table), join_episodes(credit)
    learned = credit.learn & credit.valid.any(1)
    if not table.names or not len(table) or not credit.values.shape[1] or len(table) != len(credit):
        return {}
    usable = learned.any(-1) & ~table.reward().isnan()  # (rows,)
    index = group_index([table.group])
    # (rows,) advantage of each row: the mean over its positions.
    places = (credit.values[:, 0] * learned).sum(-1) / learned.sum(-1).clamp(min=1)
    weighted = [table.at_end(name).nan_to_num() * weight for name, weight in table.weights.items()]

    def centred(values: Tensor) -> Tensor:
        valid = usable[:, None].expand_as(values)
        return torch.where(valid, values - group_mean(values, index, valid), 0.0)

    parts, advantage = centred(torch.stack(weighted, 1)), centred(places[:, None])  # rows x rewards; rows x 1
    whole = parts.sum(1, keepdim=True)  # (rows, 1)
    against, square = group_sum(advantage * whole, index), group_sum(whole.square(), index)
    # Least squares per group: c = sum(a d) / sum(d^2), 0 if all rewards are equal.
    slope = torch.where(square > EQUAL**2, against / square.clamp(min=EQUAL**2), 0.0)[index]
    explained = (slope * advantage * parts).sum(0)  # (rewards,)
    if not explained.sum() > EQUAL**2:
        return {}
    shares = (explained / explained.sum()).tolist()
    return {f"rewards/{name}/advantage_share": share for name, share in zip(table.names, shares, strict=True)}


def describe_speed(table: RewardTable, seconds: float) -> dict[str, float]:
    """Compute the throughput of a training step: rollouts, and tokens or denoising steps, per second."""
    table = on_policy_rows(join_episodes(table))
    counts = {"rollouts": float(len(table)), "steps": float(table.length.sum())}
    return {f"time/{name}_per_second": count / seconds for name, count in counts.items() if seconds > 0}


def describe_lengths(table: RewardTable) -> dict[str, float]:
    """Compute the length metrics of a training step: tokens of texts, denoising steps of other media.

    A text counts as clipped if its tag `finish` is `length`. All rows of an episode count as one text.
    """
    table = on_policy_rows(join_episodes(table))
    texts = _at_last(table, table.ids.get("text", torch.ones_like(table.ends))) == 1
    metrics: dict[str, float] = {}
    if not texts.all():
        metrics["denoising/steps"] = float(table.length[~texts].double().mean())
    if not texts.any():
        return metrics
    table = table.select(texts)
    length = table.length.double()
    lengths = {"mean": length.mean(), "min": length.min(), "max": length.max()}
    metrics |= {f"completions/{name}_length": float(value) for name, value in lengths.items()}
    if "finish" in table.ids:
        clipped = _at_last(table, table.ids["finish"]) == name_id("length")
        metrics["completions/clipped_ratio"] = float(clipped.double().mean())
        if not clipped.all():
            metrics["completions/mean_terminated_length"] = float(length[~clipped].mean())
    return metrics


def _at_last(table: RewardTable, column: Tensor) -> Tensor:
    """Return the values of a column (rows, outcomes) at the last outcome of each row: (rows,)."""
    return column.gather(1, table.last.clamp(min=0)[:, None])[:, 0]


def describe_measured(measured: Measured) -> dict[str, float]:
    """Return an evaluation's metrics and interval bounds: `eval_x`, `eval_x/low` and `eval_x/high`."""
    named = {f"eval_{name}": value for name, value in measured.metrics.items()}
    for name, (low, high) in measured.intervals.items():
        named |= {f"eval_{name}/low": low, f"eval_{name}/high": high}
    return named


def noted_sums(rollouts: Rollouts, name: str) -> dict[str, float]:
    """Sum the values `name` that the engine noted per token or denoising step; also count these steps."""
    notes = [row.notes[name].double() for row in rollouts if name in row.notes and row.on_policy]
    noted = [note[~note.isnan()] for note in notes]
    return {"sum": float(sum(note.sum() for note in noted)), "steps": float(sum(map(len, noted)))}


def noted_ages(rollouts: Rollouts, step: int) -> dict[str, float]:
    """Return the numbers of sampled tokens and of tokens from older weights, and the sum and maximum of ages.

    The age of a token is `step` minus the training step of the weights that sampled it.
    """
    sampled = [row for row in rollouts if row.on_policy]
    noted = [step - row.notes[VERSION].double() for row in sampled if VERSION in row.notes]
    age = torch.cat([*noted, torch.zeros(1, dtype=torch.float64)])  # a 0, because `max` needs a value
    counts = {"tokens": sum(row.length for row in sampled), "older": int((age > 0).sum())}
    return {**counts, "sum": float(age.sum()), "max": float(age.max())}


def describe_ages(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the `noted_ages` of all processes into mean age, maximum age and fraction of older tokens."""
    tokens, older, total = (sum(part[name] for part in parts) for name in ("tokens", "older", "sum"))
    mean, share = total / max(1, tokens), older / max(1, tokens)
    longest = max(part["max"] for part in parts)
    return {"sampling/age/mean": mean, "sampling/age/max": longest, "sampling/age/older_share": share}


class Meter:
    """Accumulator of the metrics of micro-batches.

    Each micro-batch's metrics are already divided by totals of the update, so their sum is the mean.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.updates = 0  # the caller increments this after the last micro-batch of an update

    def add(self, metrics: Mapping[str, Tensor], counts: float) -> None:
        """Add the metrics of a micro-batch, times `counts` (0 for a padding micro-batch)."""
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + counts * value.detach().double().cpu()

    def take(self) -> dict[str, float]:
        """Return the mean of each metric over the updates since the last call, and reset."""
        means = {name: float(value) / max(self.updates, 1) for name, value in self.sums.items()}
        self.sums, self.updates = {}, 0
        return means


class Journal:
    """JSON-lines file whose records have a step; a resumed run drops records after its checkpoint."""

    def __init__(self, folder: Path, name: str = "metrics.jsonl") -> None:
        self.path = folder / name

    def write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append a record and return it as `read` would; non-finite numbers are written as null."""
        line = to_line(record)
        with self.path.open("a") as file:
            file.write(line)
        return from_line(line)

    def flush(self) -> None:
        """Sync the file to disk."""
        if self.path.exists():
            flush(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Read all records; skip an incomplete last line silently, and damaged lines with a warning."""
        data = self.path.read_bytes() if self.path.exists() else b""
        records = []
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            try:
                records.append(from_line(line))
            except (ValueError, TypeError, AttributeError, KeyError):
                if line.endswith(b"\n"):  # complete, so not cut off by a crash
                    log.warning("'%s': line %d is damaged and left out", self.path, number)
        return records

    def rewind(self, step: int) -> None:
        """Drop all records from `step` on."""
        if self.path.exists():
            earlier = (to_line(record) for record in self.read() if record["step"] < step)
            write_whole(self.path, "".join(earlier))


def of_training(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of training steps, without an evaluation before the first step."""
    return [record for record in records if steps_taken(record)]


def steps_taken(record: Mapping[str, Any]) -> int:
    """Return the number of steps done when a record was written; 0 for an evaluation before training."""
    trained = any(not name.startswith("eval_") for name in record.keys() - {"step", "cheap"})
    return record["step"] + trained


def to_line(record: Mapping[str, Any]) -> str:
    """Format a record as a line of JSON; non-finite numbers become null."""
    # `json.dumps` writes NaN and Infinity, which are invalid JSON; `parse_constant` replaces them by null.
    finite = json.loads(json.dumps(record), parse_constant=lambda constant: None)
    return json.dumps(finite) + "\n"


def from_line(line: str | bytes) -> dict[str, Any]:
    """Parse a line of JSON as a record; null becomes NaN."""
    record = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
    match record:
        case {"step": int()}:
            return record
    raise ValueError(f"a record needs a whole number as its step, not {record.get('step')!r}")


class Trackers:
    """The trackers of a run, which receive the finite metrics of every reported step."""

    def __init__(self, pieces: Sequence[Tracker] = ()) -> None:
        self.pieces, self.opened = pieces, False

    def open(self, folder: Path, config: Mapping[str, Any], start: int, say: Callable[[str], None]) -> None:
        """Open every tracker at step `start`; `say` prints the messages of trackers on the console."""
        for piece in self.pieces:
            if note := piece.open(folder, config, start):
                say(note)
        self.opened = True

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the finite metrics of a step to every tracker."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for piece in self.pieces if self.opened else ():
            piece.write(finite, step)

    def close(self) -> None:
        """Close every tracker."""
        for piece in self.pieces if self.opened else ():
            piece.close()
        self.opened = False


def write_measured(folder: Path, measured: Measured) -> None:
    """Write the metrics and intervals of an evaluation to `evaluation.json`."""
    written = {"metrics": dict(measured.metrics), "intervals": dict(measured.intervals)}
    write_whole(folder / EVALUATION, json.dumps(written, indent=2))
