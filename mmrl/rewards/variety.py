"""Penalty of repetition: the fraction of repeated n-grams of words."""

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
    """Return `max_penalty` times the fraction of repeated word n-grams (as in open-rs and TRL's recipes).

    The fraction is 1 - distinct n-grams / all n-grams, ignoring case. An answer of fewer than `ngram_size`
    words gets 0. The code of open-rs (arXiv 2503.16219) contains this reward, but does not use it.
    """
    share = distinct_share((outcome.text or "").lower().split(), ngram_size)
    return 0.0 if share is None else max_penalty * (1 - share)


def distinct_share(words: Sequence[str], size: int) -> float | None:
    """Compute the number of distinct word n-grams divided by all; None for fewer than `size` = n words."""
    ngrams = list(zip(*(words[i:] for i in range(size)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else None
