"""Advantage functions that read how often tools were called, and what was found on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import label, tagged_as
from mmrl.advantages.shape import column_of
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, RewardTable, name_id
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


@advantage
def gated_bonus(
    table: RewardTable,
    *,
    of: str,
    format: str,
    share: str,
    format_weight: Probability = 0.2,
    bonus_weight: NonNegativeFloat = 0.4,
) -> RewardTable:
    """Pay for good steps only once answer and format are right (HiPRAG, arXiv 2510.07794).

    (1 - format_weight) A + format_weight F, and bonus_weight times the share of good steps where both A and F
    are 1; nothing is added where that share is not known. It stands for `total`.

    Args:
        of: Name of the reward A of the answer, from 0 to 1.
        format: Name of the reward or label F of the format, from 0 to 1.
        share: Name of the label with the share of good steps, such as a judge's, from 0 to 1.
        format_weight: The paper's 0.2.
        bonus_weight: The paper's 0.4.
    """
    right, good, steps = label(table, of), label(table, format), label(table, share)
    gate = (right >= 1 - EQUAL) & (good >= 1 - EQUAL)
    base = (1 - format_weight) * right + format_weight * good
    earned = base + torch.where(gate, bonus_weight * steps.nan_to_num(), 0.0)
    return table.replace(values=earned.nan_to_num(), valid=~earned.isnan(), weights={"total": 1.0})


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
    """Reward sub-agents for what the main agent reached (M-GRPO, arXiv 2511.13288).

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
    """Mark places (N, K) whose word comes again later in the row."""
    same = (words[:, :, None] == words[:, None]) & present[:, None]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).triu(1)).any(-1)
