"""IGPO (arXiv 2510.14967): a turn earns the increase in the probability of the right answer.

Title: Information Gain-based Policy Optimization: A Simple and Effective Approach for Multi-Turn LLM Agents
Formula: r_t = p_(t+1) - p_t, and the outcome at the last turn.
Our reading: turns of the same number are compared, where the code compares tokens at the same position.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import label
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(every_turn=True)
def information_gain(table: RewardTable, *, of: str) -> RewardTable:
    """Reward a turn with the rise of the right answer's probability (IGPO, arXiv 2510.14967).

    r_t = p_(t+1) - p_t is added for all turns but the last; p_t is a label that the engine records for every
    turn (`at: every`), the probability of the right answer before the turn. A change that is not known is 0.
    Put it after `total`, before `returns` and `group_center`, which compares turns of the same number; the
    code compares tokens at the same position.
    """
    p = label(table, of)
    gain = torch.cat([p.diff(dim=-1), torch.zeros_like(p[..., :1])], -1).nan_to_num()
    final = (table.ids["place"] == table.last[:, None])[:, None]
    rewards = torch.where(table.valid, table.values, 0.0)
    known = table.valid.any(-1, keepdim=True) & table.present[:, None]
    return table.replace(values=torch.where(final, rewards, rewards + gain) * known, valid=known)
