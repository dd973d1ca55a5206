"""Rewards of the form of a text. An answer that cannot be parsed earns little; it is not missing."""

from __future__ import annotations

import re
from typing import Annotated

from mmrl.config.ranges import AtMost, PositiveInt
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome, tagged
from mmrl.core.types import Outcome, Prompt


def _full_match(tags: str, text: str) -> bool:
    inner = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in tags.split(","))
    return re.fullmatch(inner, text.strip(), re.DOTALL | re.IGNORECASE) is not None


@reward
@per_outcome
def tag_format(prompt: Prompt, outcome: Outcome, *, tags: str = "") -> float:
    """Give 1 if the answer is exactly the blocks that were asked for, in order: `think,answer` or `answer`.
    Otherwise 0.

    Without `tags`, the answer's own tag `format` says what was asked (a demonstration without reasoning),
    else the prompt's column `format`, else `think,answer`. Case and surrounding space do not matter; an empty
    block is a block (TON, arXiv 2505.16854).
    """
    asked = tags or outcome.tags.get("format") or prompt.columns.get("format") or "think,answer"
    return float(_full_match(asked, outcome.text or ""))


@reward
@per_outcome
def think_format(prompt: Prompt, outcome: Outcome) -> float:
    """Give 1 if the answer begins with one closed think block (TRL's think_format_reward), else 0."""
    text = outcome.text or ""
    return float(re.match(r"<think>(?!.*<think>).*?</think>", text, re.DOTALL) is not None)


@reward
@per_outcome
def exact_match(prompt: Prompt, outcome: Outcome, *, tag: str = "answer") -> float:
    """Give 1 if the last block `tag` (or the whole text where there is none) is the target, but for case and
    space."""
    text = outcome.text or ""
    blocks = tagged(text, tag)
    given = blocks[-1] if blocks else text
    return float(" ".join(given.lower().split()) == " ".join(str(prompt.target).lower().split()))


@reward
@per_outcome
def overlong(
    prompt: Prompt,
    outcome: Outcome,
    *,
    max_completion_length: PositiveInt,
    soft_punish_cache: Annotated[PositiveInt, AtMost("max_completion_length")],
) -> float:
    """Punish length softly before the hard limit (DAPO, arXiv 2503.14476): 0, then a line down to -1, and -1
    beyond.

    The line begins `soft_punish_cache` steps before `max_completion_length`. Lengths are steps, which the
    engine counted.
    """
    if outcome.end is None:
        raise ValueError(f"`overlong` counts steps, but the outcome of prompt '{prompt.uid}' has no `end`")
    start = max_completion_length - soft_punish_cache
    if outcome.end <= start:
        return 0.0
    return (start - outcome.end) / soft_punish_cache if outcome.end <= max_completion_length else -1.0


@reward
@per_outcome
def precomputed(prompt: Prompt, outcome: Outcome, *, key: str) -> float | None:
    """Read a reward that was measured earlier, or by the engine; None where there is none."""
    return outcome.recorded.get(key)
