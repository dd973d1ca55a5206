"""M-GRPO (arXiv 2511.13288): sub-agents earn a reward by the success of the main agent.

Title: Multi-Agent Deep Research: Training Multi-Agent Systems with M-GRPO
Formula: r of a sub-agent = 0 for a bad format, 0.1 where the main agent failed, else 1.
Our reading: all rows of sub-agents count, where the paper repeats or drops some to align their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.notes import label, tagged_as
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id


@advantage(turns=True, tags={"role"})
def delegated_reward(
    table: RewardTable,
    *,
    of: str,
    format: str = "",
    main: str = "main",
    failed: float = 0.1,
    below: float = 0.1,
    above: float = 1.0,
) -> RewardTable:
    """Reward sub-agents by the success of the main agent (M-GRPO, arXiv 2511.13288).

    A turn of another role than `main` earns 0 where its format is bad, `below` where the reward `of` of the
    conversation is at most `failed`, `above` otherwise, at the last turn of the role; turns of the main agent
    keep their rewards. Every agent is compared with its own kind where `{name: per_episode, by: [role],
    advantage: [{name: group_normalize, by: [group, role]}]}` follows. Our reading: the paper aligns the
    number of sub-agents' rows by repeating or dropping some at random; here all count as they are.

    Args:
        of: Name of the reward of the whole conversation.
        format: Label that is 0 for turns of a bad format; empty: none.
        main: Word of the tag `role` for the main agent.
        failed: Largest reward of the conversation that counts as failed.
        below: Reward of a sub-agent then.
        above: Reward of a sub-agent otherwise.
    """
    roles = tagged_as(table, "role")
    sub = table.present & (roles != name_id(main))
    reached = table.at_end(of)[:, None].expand(roles.shape)
    earned = torch.full_like(reached, below).masked_fill(reached > failed, above)
    if format:
        earned = torch.where(label(table, format)[:, 0] == 0, 0.0, earned)
    # A part of a conversation earns once, at its last turn of the role.
    final = sub & ~_met_again(roles, table.present)
    known = final & ~reached.isnan()
    values = torch.where(sub[:, None], torch.where(known, earned, 0.0)[:, None], table.values)
    return table.replace(values=values, valid=torch.where(sub[:, None], known[:, None], table.valid))


def _met_again(words: Tensor, present: Tensor) -> Tensor:
    """Mark entries (N, K) with an equal entry later in their row."""
    same = (words[:, :, None] == words[:, None]) & present[:, None]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).triu(1)).any(-1)
