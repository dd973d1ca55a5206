"""HiPRAG (arXiv 2510.07794): a bonus for good search steps if answer and format are right.

Title: HiPRAG: Hierarchical Process Rewards for Efficient Agentic Retrieval Augmented Generation
Formula: r = (1 - w) A + w F + b [A = F = 1] (share of good steps).
Our reading: no bonus where the share is unknown; the rule of `good_steps`, where the paper asks a judge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage, reward
from mmrl.core.answer_text import plain
from mmrl.core.reward_table import EQUAL, RewardTable
from mmrl.core.tool_calls import CallError
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.rewards.answers import needed_targets
from mmrl.rewards.tool_calls import CALL, written_calls
from mmrl.runtime.scoring import SCORING, Scoring


@reward
def good_steps(prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, tag: str = CALL) -> list[float]:
    """Return the share of good steps in a conversation, by rule (HiPRAG, arXiv 2510.07794, asks a judge).

    Steps are the tool calls and the answer. A call is good if it can be read, was not made before, and no
    earlier reply holds a right answer as text: else the policy could have answered without it (over-search).
    The answer is a good step: `gated_bonus` pays only for right ones. Our reading.

    Args:
        tag: Tag of a call in a text without a conversation.
    """
    talks = (SCORING.get(None) or Scoring()).turns or [()] * len(outcomes)
    return [
        _share_of_good(talk or [Message("assistant", (Part(outcome.text or ""),))], prompt, tag)
        for prompt, outcome, talk in zip(prompts, outcomes, talks, strict=True)
    ]


def _share_of_good(talk: Sequence[Message], prompt: Prompt, tag: str) -> float:
    """Return the share of good steps in the messages of a conversation."""
    targets = [re.escape(plain(target).lower()) for target in needed_targets("good_steps", prompt)]
    made, good, steps, known = [], 1, 1, False
    for message in talk:
        if message.role != "assistant":
            known |= any(
                re.search(rf"(?<!\w){target}(?!\w)", plain(message.text).lower()) for target in targets
            )
            continue
        for call in written_calls(message, tag):
            good += not (known or isinstance(call, CallError) or call in made)
            steps += 1
            made.append(call)
    return good / steps


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
