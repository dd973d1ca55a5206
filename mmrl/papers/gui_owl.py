"""GUI-Owl's TRPO (arXiv 2508.15144): divide the loss of a step by the turns of its conversation.

Title: Mobile-Agent-v3: Fundamental Agents for GUI Automation
Formula: A' = A / (number of turns).
Our reading: the loss is divided by that number, so that long and short conversations weigh the same.
"""

from __future__ import annotations

from typing import Literal

from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(every_turn=True)
def episode_mean(table: RewardTable, *, scale: Literal["div", "mul"] = "div") -> RewardTable:
    """Divide advantages by the number of turns of their conversation (GUI-Owl, arXiv 2508.15144).

    The paper scales the loss of a step by that number; our reading is to divide, so that long and short
    conversations weigh the same. `scale: mul` multiplies.
    """
    turns = table.present.sum(-1).clamp(min=1)[:, None, None].double()
    return table.put(table.values / turns if scale == "div" else table.values * turns)
