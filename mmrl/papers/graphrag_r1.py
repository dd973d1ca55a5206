"""GraphRAG-R1 (arXiv 2507.23581): F1 with a cost per retrieval, and a bonus for retrieving at all.

Title: GraphRAG-R1: Graph Retrieval-Augmented Generation with Process-Constrained Reinforcement Learning
Formula: F1 exp(-rate n), and first (1 - decay^m) / (1 - decay), for n retrievals of which m differ.
Our reading: both formulas; the paper's were not available.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from mmrl.config.binding import Bound
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, ShareBelowOne
from mmrl.config.registry import reward
from mmrl.core.answer_text import tagged
from mmrl.core.types import Message, Outcome, Prompt
from mmrl.rewards.adapters import policy_messages
from mmrl.rewards.tool_calls import ANSWERED, CALL, calls_in


def retrievals(outcomes: Sequence[Outcome], tag: str) -> list[tuple[list[str], list[str]]]:
    """List the retrievals of a policy up to every outcome, in the two parts of `policy_messages`.

    A retrieval is a block that holds a text, or, with the tag `tool_call`, a call that `vision.with_tools`
    can read. Those of a turn that ended its conversation at a limit or a fault got no answer: they are none.
    """

    def queries(turns: Sequence[Message]) -> list[str]:
        if tag == CALL:
            calls = [call for turn in turns for call in calls_in(turn)]
            return [json.dumps([call.name, call.arguments], sort_keys=True) for call in calls]
        return [block.strip() for turn in turns for block in tagged(turn.text, tag) if block.strip()]

    return [
        (queries(before), queries(new if outcome.tags.get("finish", "stop") in ANSWERED else new[:-1]))
        for outcome, (before, new) in zip(outcomes, policy_messages(outcomes), strict=True)
    ]


@reward
def retrieval_bonus(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    tag: str = CALL,
    first: NonNegativeFloat = 0.5,
    decay: ShareBelowOne = 0.5,
) -> list[float]:
    """Pay for retrievals, each less than the one before: first (1 - decay^n) / (1 - decay).

    For GraphRAG-R1 (arXiv 2507.23581), whose formula was not found: our reading. n counts different
    retrievals that were answered in the conversation, so copies of a query earn nothing; with the defaults it
    stays below 1. With `at: every` a turn has what its retrievals add.

    Args:
        tag: Tag of a retrieval, such as `tool_call` or `search`.
        first: Reward of the first retrieval.
        decay: Factor from each to the next.
    """

    def paid(queries: Sequence[str]) -> float:
        return first * (1 - decay ** len(set(queries))) / (1 - decay)

    return [paid([*before, *new]) - paid(before) for before, new in retrievals(outcomes, tag)]


@reward
def cost_aware(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    reward: Callable[[], Bound],
    tag: str = CALL,
    rate: NonNegativeFloat = 0.1,
    free: NonNegativeInt = 0,
) -> list[float | None]:
    """Discount another reward by exp(-rate n) for n retrievals (GraphRAG-R1's cost-aware F1).

    arXiv 2507.23581, whose formula was not found: our reading. All retrievals of the conversation so far that
    were answered count, repeated ones too.

    Args:
        reward: What is discounted.
        tag: Tag of a retrieval.
        rate: Cost of a retrieval.
        free: Retrievals that cost nothing.
    """
    values = reward()(prompts, outcomes)
    counts = [len(before) + len(new) for before, new in retrievals(outcomes, tag)]
    return [
        None if value is None else value * math.exp(-rate * max(0, count - free))
        for value, count in zip(values, counts, strict=True)
    ]
