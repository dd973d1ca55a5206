"""MultiRole-R1 (arXiv 2507.20187): a small reward for varied wording of right answers.

Title: Diversity-Enhanced Reasoning for Subjective Questions
Formula: r = 0.9 [right] + 0.1 (mean of eight measures of variety, each from 0 to 1).
Our reading: the two weights, the formulas of the measures, and that they weigh the same.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import per_outcome
from mmrl.rewards.variety import distinct_share

WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
SENTENCE = re.compile(r"[^.!?\n]+")
FUNCTION_WORDS = {
    "a", "an", "the", "this", "that", "these", "those", "and", "or", "but", "nor", "so", "yet", "if",
    "because", "although", "while", "when", "where", "since", "unless", "of", "in", "on", "at", "by",
    "for", "with", "from", "to", "into", "over", "under", "between", "through", "about", "against",
    "before", "after", "during", "without", "within", "i", "you", "he", "she", "it", "we", "they", "me",
    "him", "her", "us", "them", "my", "your", "his", "its", "our", "their", "who", "which", "what",
    "is", "are", "was", "were", "be", "been", "being", "have", "has", "had", "do", "does", "did",
    "will", "would", "can", "could", "may", "might", "shall", "should", "must", "not", "no", "as",
    "than", "then", "there", "here", "also", "only", "very",
}  # fmt: skip


@reward
@per_outcome
def lexical_variety(
    prompt: Prompt, outcome: Outcome, *, weights: Mapping[str, NonNegativeFloat] | None = None
) -> float:
    """Return how varied the wording of an answer is, from 0 to 1, by eight measures (MultiRole-R1).

    arXiv 2507.20187 names what is measured: `vocabulary`, `entropy` of words, `sentence_length`,
    `sentence_form`, `neighbours` (neighbouring sentences), `yule` (1 - K / 10,000), `ngrams` (distinct pairs
    of words) and `function_words`. Our readings: their formulas, and equal `weights`, which may name some of
    them. Give it a weight below that of being right, such as 0.1 beside 0.9, so that a wrong answer never
    outscores a right one. An empty answer earns 0.
    """
    chosen = weights or dict.fromkeys(MEASURES, 1.0)
    if unknown := chosen.keys() - MEASURES.keys():
        raise ValueError(
            f"`weights` of lexical_variety names {sorted(unknown)}; there are {', '.join(MEASURES)}"
        )
    sentences = [WORD.findall(part.lower()) for part in SENTENCE.findall(outcome.text or "")]
    sentences = [words for words in sentences if words]
    if not sentences:
        return 0.0
    total = sum(weight * MEASURES[name](sentences) for name, weight in chosen.items())
    return total / sum(chosen.values())


Sentences = Sequence[Sequence[str]]


def _words(sentences: Sentences) -> list[str]:
    return list(itertools.chain.from_iterable(sentences))


def _vocabulary(sentences: Sentences) -> float:
    """Distinct words over words."""
    words = _words(sentences)
    return len(set(words)) / len(words)


def _entropy(sentences: Sentences) -> float:
    """Entropy of the words over the most that so many words can have; 0 for a single one."""
    counts = Counter(_words(sentences))
    total = counts.total()
    entropy = sum(n / total * math.log(total / n) for n in counts.values())
    return entropy / math.log(total) if total > 1 else 0.0


def _sentence_length(sentences: Sentences) -> float:
    """Deviation of the lengths over deviation plus mean; 0 for a single sentence."""
    lengths = [len(words) for words in sentences]
    mean = sum(lengths) / len(lengths)
    deviation = math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths))
    return deviation / (deviation + mean)


def _sentence_form(sentences: Sentences) -> float:
    """Distinct beginnings of two words over sentences; 0 for a single sentence."""
    return len({tuple(words[:2]) for words in sentences}) / len(sentences) if len(sentences) > 1 else 0.0


def _neighbours(sentences: Sentences) -> float:
    """1 minus the mean share of words that neighbouring sentences have in common; 0 for a single one."""
    shared = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairwise(sentences)]
    return 1 - sum(shared) / len(shared) if shared else 0.0


def _yule(sentences: Sentences) -> float:
    """1 - K / 10,000, where K = 10,000 (sum of squared counts - words) / words squared (Yule 1944)."""
    counts = Counter(_words(sentences))
    total = counts.total()
    return 1 - (sum(n * n for n in counts.values()) - total) / total**2


def _ngrams(sentences: Sentences) -> float:
    """Distinct pairs of neighbouring words over all; 0 for a single word."""
    return distinct_share(_words(sentences), 2) or 0.0


def _function_words(sentences: Sentences) -> float:
    """Distinct function words over function words; 0 without any."""
    used = [word for word in _words(sentences) if word in FUNCTION_WORDS]
    return len(set(used)) / len(used) if used else 0.0


MEASURES: Mapping[str, Callable[[Sentences], float]] = {
    "vocabulary": _vocabulary,
    "entropy": _entropy,
    "sentence_length": _sentence_length,
    "sentence_form": _sentence_form,
    "neighbours": _neighbours,
    "yule": _yule,
    "ngrams": _ngrams,
    "function_words": _function_words,
}
