"""DUMP (arXiv 2504.09710): a bandit over the sources of the data prefers the largest advantages.

Title: DUMP: Automated Distribution-Level Curriculum Learning for RL-based LLM Post-training
Formula: score = mean |advantage| of a source + sqrt(2 ln(n + 1) / (n_source + 1)); sources by softmax.
Our reading: no prompt comes twice in a draw; recorded answers do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import sampler
from mmrl.core.reward_table import RewardTable
from mmrl.core.rng import Stream
from mmrl.core.types import Prompt, Rollouts
from mmrl.samplers.candidates import evenness
from mmrl.samplers.sources import Sources, sources_of


@sampler
class SourceBandit:
    """Draw from the sources whose rollouts have the largest advantages (DUMP, arXiv 2504.09710).

    A source's score is the mean absolute advantage of its latest rollouts and an upper confidence bound's
    bonus, sqrt(2 ln(n + 1) / (n_source + 1)), n all rollouts so far. Each prompt of a draw has a source
    drawn from the softmax of the scores, and is uniform in it. Groups that a filter dropped count with
    advantages of 0. Our readings: no prompt comes twice in a draw, so a source of which all prompts were
    drawn leaves its part to the others; the advantage of a rollout is the mean over its places; recorded
    answers do not count.

    Args:
        by: Column whose values are the sources; "": the split of the data set.
        temperature: Of the softmax (the paper: 0.1).
        window: Rollouts of a source that its mean is over (the paper: 300).
    """

    def __init__(
        self,
        data: Sequence[Prompt],
        *,
        stream: Stream,
        by: str = "",
        temperature: PositiveFloat = 0.1,
        window: PositiveInt = 300,
    ) -> None:
        self.temperature, self.window = temperature, window
        self.stream, self.among = (
            stream,
            Sources(data, stream, sources_of(data, by, "source_bandit"), "source_bandit"),
        )
        self.sources = self.among.names
        self.latest = {
            name: torch.zeros(0, dtype=torch.float64) for name in self.sources
        }  # |a|, oldest first
        self.count = torch.zeros(len(self.sources), dtype=torch.float64)  # rollouts so far
        self.waiting: dict[int, int] = {}  # place of a prompt to its rollouts that await advantages

    def draw(self, num_prompts: int, num_generations: int) -> list[Prompt]:
        """Draw a source for every prompt, and a prompt of it; no prompt twice."""
        if self.among.candidates.begins():
            self.waiting = {}
        return self.among.draw(self.probabilities.clamp(min=1e-30), num_prompts, num_generations)

    @property
    def learnability(self) -> Tensor:
        """The mean absolute advantage in the window of every source, 0 without any: (S,)."""
        means = [float(latest.mean()) if len(latest) else 0.0 for latest in self.latest.values()]
        return torch.tensor(means, dtype=torch.float64)

    @property
    def bounds(self) -> Tensor:
        """The upper confidence bound of every source: (S,)."""
        total = max(1.0, float(self.count.sum()))
        return self.learnability + (2 * math.log(total + 1) / (self.count + 1)).sqrt()

    @property
    def probabilities(self) -> Tensor:
        """The probability of every source: (S,)."""
        return (self.bounds / self.temperature).softmax(0)

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Record the rollouts of this step; groups with a faulty reward are repeated and not recorded."""
        for place, rows in self.among.candidates.rows(table, table.learn.any(-1)).items():
            self.waiting[place] = self.waiting.get(place, 0) + len(rows)

    def observe_advantages(self, credit: RewardTable) -> None:
        """Append the absolute advantages of a step to the windows; rows that a filter dropped count as 0."""
        valid = credit.valid[:, 0]
        sums = torch.where(valid, credit.values[:, 0], 0.0).sum(-1)
        size = (sums / valid.sum(-1).clamp(min=1)).abs()  # (N,)
        found = self.among.candidates.rows(credit, valid.any(-1))
        for place, count in self.waiting.items():
            rows = found.get(place)
            fresh = size.new_zeros(count) if rows is None else size[rows]
            i = int(self.among.source[place])
            name = self.sources[i]
            self.latest[name] = torch.cat([self.latest[name], fresh])[-self.window :]
            self.count[i] += len(fresh)
        self.waiting = {}

    def pop_metrics(self) -> Mapping[str, float]:
        """Report how even the draws are over the sources, and the probability of each."""
        chance = self.probabilities
        named = {f"sampler/share/{name}": share for name, share in self.among.of(chance).items()}
        return {"sampler/entropy": evenness(chance), **named}

    def state_dict(self) -> dict[str, Any]:
        """Return the windows and the counts by source."""
        return {
            "latest": dict(self.latest),
            "count": self.among.of(self.count),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore windows and counts; a source that was not there before begins without any."""
        for i, name in enumerate(self.sources):
            if name in state["latest"]:
                self.latest[name] = state["latest"][name][-self.window :].clone()
                self.count[i] = state["count"][name]
