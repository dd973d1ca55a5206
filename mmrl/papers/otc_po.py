"""OTC-PO (arXiv 2504.14870): scale the reward of right answers by their tool calls over the fewest.

Title: Acting Less is Reasoning More! Teaching Model to Act Efficiently
Formula: r' = r sin(f pi / 2 n), f = 2 n m / (m + n); where n = 0, r cos(m pi / (2 m + c)); m calls, n the
fewest of a right answer.
Our reading: the factor is 1 until an answer was right, and without a count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mmrl.advantages.shape import column_of
from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable
from mmrl.core.types import Rollouts


@advantage
class ToolProductivity:
    """Multiply a reward by how few tool calls the answer needed (OTC-PO, arXiv 2504.14870).

    With m calls, and n the fewest calls of a right answer to this prompt so far, the factor is
    sin(f pi / 2 n) with f = 2 n m / (m + n), 1 at m = n; where n = 0, cos(m pi / (2 m + smoothing)). Our
    readings: the factor is 1 as long as no answer was right, and a missing count changes nothing. Put it
    before `total`.

    Args:
        of: Name of the reward of a right answer; others are multiplied, too, where they are not 0.
        calls: Label with the number of calls, such as `tool_calls` of weight 0.
        threshold: An answer is right above this reward.
        smoothing: Constant c of the cosine, about the largest number of calls.
        fewest: Compare with the fewest calls of the prompt (`prompt`, for GRPO), or always with none
            (`none`, the form for PPO, which needs no group).
    """

    def __init__(
        self,
        *,
        of: str,
        calls: str,
        threshold: float = 0.5,
        smoothing: PositiveFloat = 1.0,
        fewest: Literal["prompt", "none"] = "prompt",
    ) -> None:
        self.of, self.calls, self.threshold = of, calls, threshold
        self.smoothing, self.fewest = smoothing, fewest
        self.least: dict[str, float] = {}  # calls of the right answers by uid

    def observe(self, rollouts: Rollouts, table: RewardTable) -> None:
        """Note the fewest calls of right answers."""
        if not len(table):
            return
        right = table.at_end(self.of) > self.threshold
        calls = table.at_end(self.calls)
        for row in (right & ~calls.isnan()).nonzero()[:, 0].tolist():
            uid, number = table.uids[row], float(calls[row])
            self.least[uid] = min(number, self.least.get(uid, number))

    def __call__(self, table: RewardTable) -> RewardTable:
        """Multiply the reward."""
        column = column_of(table, self.of)
        factors = []
        for uid, calls in zip(table.uids, table.at_end(self.calls).tolist(), strict=True):
            least = 0.0 if self.fewest == "none" else self.least.get(uid)
            if least is None or math.isnan(calls):
                factors.append(1.0)
            else:
                factors.append(productivity(calls, least, self.smoothing))
        values = table.values.clone()
        values[:, column] *= torch.tensor(factors, dtype=torch.float64)[:, None]
        return table.put(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the fewest calls by uid."""
        return {"least": dict(self.least)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.least = dict(state["least"])


def productivity(calls: float, least: float, smoothing: float) -> float:
    """Return OTC-PO's factor of an answer with a number of calls, where `least` calls are enough."""
    if not least:
        return math.cos(calls * math.pi / (2 * calls + smoothing))
    return math.sin(calls * math.pi / (calls + least))  # f pi / 2 n = m pi / (m + n)
