"""meow-tea-taro (arXiv 2510.01132): divide the reward of a successful conversation among its turns.

Title: A Practitioner's Guide to Multi-turn Agentic Reinforcement Learning
Formula: r_t / (number of paid turns) where the conversation was won, else r_t / (largest sum of the task).
Our reading: none.
"""

from __future__ import annotations

import torch

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(every_turn=True)
def share_among_turns(
    table: RewardTable, *, of: str, above: float = 0.5, largest: NonNegativeFloat = 1.0
) -> RewardTable:
    """Divide rewards of turns so that a conversation that was won earns 1 in all (meow-tea-taro).

    arXiv 2510.01132: by the number of its turns with a reward above 0 where it was won, otherwise by the
    largest sum that the task can pay, so that it earns less; by 1 at least. Rewards of turns are 0 or 1. Put
    it after `total`, before `returns`.

    Args:
        of: Name of the reward or label that says whether a conversation was won.
        above: It was won above this.
        largest: Largest sum of the rewards of turns in the task.
    """
    paid = (table.valid & (table.values > 0)).sum(-1, keepdim=True).double()
    success = (table.at_end(of) > above)[:, None, None]  # False for NaN
    return table.put(table.values / torch.where(success, paid, largest).clamp(min=1))
