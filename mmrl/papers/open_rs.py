"""open-rs (arXiv 2503.16219): a reward for right answers that falls with length along a cosine.

Title: Reinforcement Learning for Reasoning in Small LLMs: What Works and What Doesn't
Formula: r = end + (start - end) (1 + cos(pi L / M)) / 2 at length L of at most M.
Our reading: lengths are in tokens, and one beyond M counts as M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from mmrl.config.binding import Bound
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def think_closed(prompt: Prompt, outcome: Outcome) -> float:
    """Return 1 if a line that is `</think>` alone ends the thought exactly once, else 0 (open-rs).

    For models whose prompt opens the think block already (arXiv 2503.16219).
    """
    return float((outcome.text or "").count("\n</think>\n") == 1)


@reward
def cosine_length(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    reward: Callable[[], Bound],
    max_completion_length: PositiveInt,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    unit: Literal["tokens", "characters"] = "tokens",
    clamp: bool = True,
) -> list[float | None]:
    """Reward right answers more and wrong ones less where they are short, along half a cosine (open-rs).

    `end + (start - end) (1 + cos(pi L / M)) / 2` at length L of at most M (arXiv 2503.16219). None where the
    answer cannot be judged.

    Args:
        reward: Judges an answer: right above 0.5, wrong up to it.
        max_completion_length: M, at which the reward has its end value.
        right: Rewards of a right answer of length 0 and M.
        wrong: Those of a wrong one; open-rs' script has (0, -0.5), which prefers short wrong answers.
        unit: What L counts: steps as the engine counted them, or characters, as open-rs' code does.
        clamp: Whether an answer longer than M counts as M; open-rs' code goes on along the cosine, to that of
            length 0 at 2 M.
    """
    judged = reward()(prompts, outcomes)
    rewards: list[float | None] = []
    for prompt, outcome, value in zip(prompts, outcomes, judged, strict=True):
        if value is None:
            rewards.append(None)
            continue
        length = outcome.end if unit == "tokens" else len(outcome.text or "")
        if length is None:
            raise ValueError(
                f"`cosine_length` counts steps, but the outcome of prompt '{prompt.uid}' has none"
            )
        share = length / max_completion_length
        start, end = right if value > 0.5 else wrong
        rewards.append(
            end + (start - end) * (1 + math.cos(math.pi * (min(share, 1.0) if clamp else share))) / 2
        )
    return rewards
