"""Rewards for the format and content of a text; an answer that cannot be parsed gets a low reward."""

from __future__ import annotations

import re
from typing import Annotated

from mmrl.config.ranges import AtMost, PositiveInt
from mmrl.config.registry import reward
from mmrl.core.answer_text import answer_part, tagged
from mmrl.core.answers import word_f1, words_of
from mmrl.core.choices import choices_in
from mmrl.core.reward_table import name_id
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome
from mmrl.rewards.answers import (
    MATH,
    AnswerForm,
    comparable,
    graded,
    needed_targets,
    own_block,
    own_text,
)


@reward
@per_outcome
def tag_format(prompt: Prompt, outcome: Outcome, *, tags: str = "") -> float:
    """Return 1 if the answer consists of the blocks `tags` in this order, else 0.

    `tags` lists the tags of the blocks, such as `think,answer`. If empty, the list is the outcome's entry
    `tags["format"]` (set for demonstrations without reasoning), the column `format`, or else `think,answer`.
    Case and surrounding space do not matter; an empty block counts (TON, arXiv 2505.16854).
    """
    names = tags or outcome.tags.get("format") or prompt.columns.get("format") or "think,answer"
    # Blocks must not contain their own opening tag: `<think>a<think>b</think>` fails.
    blocks = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in names.split(","))
    text = (outcome.text or "").strip()
    return float(re.fullmatch(blocks, text, re.DOTALL | re.IGNORECASE) is not None)


@reward
@per_outcome
def think_format(prompt: Prompt, outcome: Outcome) -> float:
    """Return 1 if the answer begins with one closed think block (TRL's think_format_reward), else 0."""
    text = outcome.text or ""
    # The look-ahead excludes a second opening tag, inside the first block or after it.
    return float(re.match(r"<think>(?!.*<think>).*?</think>", text, re.DOTALL) is not None)


@reward(own_answer=own_text)
@per_outcome
def exact_match(prompt: Prompt, outcome: Outcome, *, tag: str = "answer") -> float | None:
    r"""Return 1 if the last `tag` block of the answer equals a target up to case and space, else 0.

    Without such a block, the last \boxed{} is compared, or else the whole text. If there are several targets,
    any of them is right. Tags around a target are ignored, and 3.0 equals 3. None without a target.
    """
    return graded("exact_match", prompt, outcome, "exact", tag=tag)


@reward(packages=MATH)
@per_outcome
def answer_cluster(
    prompt: Prompt, outcome: Outcome, *, tag: str = "answer", form: AnswerForm = "exact"
) -> float | None:
    """Hash the answer to a number in [0, 1), as a label that is equal for equal answers.

    It hashes the last `tag` block of the answer, or the whole text without a block; None for an empty answer.
    `form` defines equality as for `majority`, by default up to case and space. A label is not added to the
    reward: set `weight: 0`. `semantic_entropy` and `consistency_mix` read which answers of a group agree.
    """
    words = comparable(outcome.text or "", tag, form, choices_in(prompt.columns))
    return (name_id(words) >> 10) / 2**53 if words else None  # a float has 53 bits of precision


@reward
@per_outcome
def overlong(
    prompt: Prompt,
    outcome: Outcome,
    *,
    max_completion_length: PositiveInt,
    soft_punish_cache: Annotated[PositiveInt, AtMost("max_completion_length")],
) -> float:
    """Penalize lengths shortly before the hard limit (soft overlong punishment, DAPO, arXiv 2503.14476).

    The penalty is 0 up to `max_completion_length - soft_punish_cache`, then falls linearly to -1 at
    `max_completion_length`, and stays -1. Lengths are in steps of the policy (tokens of a text).
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
    """Return the number recorded for an outcome under `key` by the data or the engine, None if missing."""
    return outcome.recorded.get(key)


@reward(own_answer=own_block)
@per_outcome
def answer_f1(prompt: Prompt, outcome: Outcome, *, tag: str = "answer") -> float | None:
    """Compute the word F1 of the last `tag` block and the best target (SQuAD, arXiv 1606.05250).

    As in GraphRAG-R1 (arXiv 2507.23581), F1 is 0 without such a block or without words. True and False count
    as yes and no. If one side is yes, no or noanswer, F1 is 0 unless both are equal. None without a target.
    """
    blocks = tagged(outcome.text or "", tag)
    targets = needed_targets("answer_f1", prompt)
    if not targets:
        return None
    answer = answer_part(blocks[-1], tag) if blocks else ""
    return max(_f1(answer, answer_part(target, tag)) for target in targets)


def _f1(answer: str, target: str) -> float:
    answer, target = (text.replace("_", " ") for text in (answer, target))
    sides = [" ".join(words_of(text)) or text.strip() for text in (answer, target)]
    sides = [{"true": "yes", "false": "no"}.get(side, side) for side in sides]
    if {"yes", "no", "noanswer"}.intersection(sides) and sides[0] != sides[1]:
        return 0.0
    return 1.0 if sides[0] == sides[1] else word_f1(answer, target)
