"""Reward of repetition: the share of n-grams of words that come again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from mmrl.config.ranges import PositiveInt, Range
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome


@reward
@per_outcome
def repetition_penalty(
    prompt: Prompt,
    outcome: Outcome,
    *,
    ngram_size: PositiveInt = 3,
    max_penalty: Annotated[float, Range(high=0)] = -1.0,
) -> float:
    """Return `max_penalty` times the share of n-grams of words that are repeats (open-rs, TRL's recipes).

    1 minus the distinct n-grams over all, without case; 0 for an answer shorter than an n-gram (arXiv
    2503.16219, which offers it and does not use it).
    """
    words = (outcome.text or "").lower().split()
    share = distinct_share(words, ngram_size)
    return 0.0 if share is None else max_penalty * (1 - share)


def distinct_share(words: Sequence[str], size: int) -> float | None:
    """Divide the number of distinct n-grams by that of all; None for a text shorter than one."""
    ngrams = list(zip(*(words[i:] for i in range(size)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else None


# ---- measures of a text as lists of words, one a sentence; all from 0 to 1
