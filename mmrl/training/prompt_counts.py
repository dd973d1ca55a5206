"""Statistics of the prompts of a run: number of rollouts and mean rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Rollouts


@dataclass
class PromptCount:
    """Statistics of one prompt; `first` and `last` are the mean rewards of its first and last group."""

    asked: int = 0  # rounds in which it had rollouts
    rollouts: int = 0
    scored: int = 0  # rollouts to which a reward applied
    total: float = 0.0  # of their rewards
    first: float = math.nan
    last: float = math.nan
    step: int = 0  # the last one in which it was asked


class PromptCounts:
    """Counts the rounds and averages the rewards (weighted sums) of every prompt.

    All numbers come from the reward table, so they are equal on every process.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.counts: dict[str, PromptCount] = {}

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Count a round."""
        rewards = table.reward().tolist() if table.names else [math.nan] * len(table)
        groups: dict[str, list[float]] = {}
        for uid, reward in zip(table.uids, rewards, strict=True):
            groups.setdefault(uid, []).append(reward)
        for uid, group in groups.items():
            count = self.counts.setdefault(uid, PromptCount())
            count.asked, count.rollouts = count.asked + 1, count.rollouts + len(group)
            count.step = self.stream.step
            if scores := [reward for reward in group if not math.isnan(reward)]:
                count.scored, count.total = count.scored + len(scores), count.total + sum(scores)
                count.last = sum(scores) / len(scores)
                count.first = count.last if math.isnan(count.first) else count.first

    def columns(self) -> dict[str, list]:
        """Return the columns of `prompts.parquet`, prompts in the order of their first rollout."""
        counts = self.counts.values()
        return {
            "uid": list(self.counts),
            "asked": [count.asked for count in counts],
            "rollouts": [count.rollouts for count in counts],
            "mean": [count.total / count.scored if count.scored else math.nan for count in counts],
            "first": [count.first for count in counts],
            "last": [count.last for count in counts],
            "step": [count.step for count in counts],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return a tensor per column, and all uids as one JSON text; 100,000 prompts take 6 MB."""
        columns = {
            field.name: torch.tensor(
                [vars(count)[field.name] for count in self.counts.values()],
                dtype=torch.float64 if field.type == "float" else torch.int64,
            )
            for field in fields(PromptCount)
        }
        return {"uids": json.dumps(list(self.counts)), **columns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        columns = (state[field.name].tolist() for field in fields(PromptCount))
        rows = zip(*columns, strict=True)
        self.counts = {
            uid: PromptCount(*row) for uid, row in zip(json.loads(state["uids"]), rows, strict=True)
        }
