"""How much the answers to one prompt differ: self-BLEU, distinct n-grams, edit distance, all of token ids."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

Tokens = Sequence[int]
SMOOTHING = 0.1  # of n-gram precisions that are 0: method 1 of Chen and Cherry, with NLTK's epsilon


def ngrams(tokens: Tokens, size: int) -> list[tuple[int, ...]]:
    """List the n-grams of an answer."""
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def distinct_3(answers: Sequence[Tokens]) -> float:
    """Compute the share of distinct 3-grams among all; 0 without any."""
    listed = [gram for answer in answers for gram in ngrams(answer, 3)]
    return len(set(listed)) / len(listed) if listed else 0.0


def self_bleu_123(answers: Sequence[Tokens]) -> float:
    """Average the BLEU of each answer against all others, of 1- to 3-grams; 0 for fewer than two answers.

    Precisions of 0 are smoothed as NLTK's method 1; an answer that shares no token with another has BLEU 0.
    """
    if len(answers) < 2:
        return 0.0
    log_bleu = [0.0] * len(answers)
    for size in (1, 2, 3):
        counts = [Counter(ngrams(answer, size)) for answer in answers]
        # The two largest counts of every n-gram: the most among the others is the second for who has most.
        most: dict[tuple[int, ...], tuple[int, int]] = {}
        for counted in counts:
            for gram, count in counted.items():
                first, second = most.get(gram, (0, 0))
                most[gram] = (max(first, count), max(second, min(first, count)))
        for i, counted in enumerate(counts):
            matches = sum(
                min(count, most[gram][1] if count == most[gram][0] else most[gram][0])
                for gram, count in counted.items()
            )
            if matches == 0 and size == 1:
                log_bleu[i] = -math.inf
            log_bleu[i] += math.log((matches or SMOOTHING) / max(1, counted.total())) / 3
    lengths = [len(answer) for answer in answers]
    for i, length in enumerate(lengths):
        others = lengths[:i] + lengths[i + 1 :]
        closest = min(others, key=lambda other: (abs(other - length), other))
        if 0 < length <= closest:  # the brevity penalty
            log_bleu[i] += 1 - closest / length
    return sum(map(math.exp, log_bleu)) / len(answers)


def one_minus_self_bleu_123(answers: Sequence[Tokens]) -> float:
    """Compute 1 - `self_bleu_123`: 0 where all answers are alike; fewer than two have no diversity, 0."""
    return 1.0 - self_bleu_123(answers) if len(answers) > 1 else 0.0


def levenshtein(first: Tokens, second: Tokens) -> int:
    """Count the insertions, deletions and replacements between two answers.

    Myers' algorithm with whole numbers as bit vectors (in the form of Hyyrö, 2003): a column of the table of
    distances is kept as the places where it rises and falls.
    """
    if not first:
        return len(second)
    where: dict[int, int] = {}  # token to the bits of its places
    for i, token in enumerate(first):
        where[token] = where.get(token, 0) | 1 << i
    every, last = (1 << len(first)) - 1, 1 << len(first) - 1
    rises, falls, distance = every, 0, len(first)
    for token in second:
        match = where.get(token, 0)
        diagonal = (((match & rises) + rises) ^ rises) | match | falls
        up, down = falls | (every & ~(diagonal | rises)), rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & every, (down << 1) & every
        rises, falls = down | (every & ~(diagonal | up)), up & diagonal
    return distance


def edit_distance(answers: Sequence[Tokens]) -> float:
    """Average the edit distance of all pairs over the length of the longer; 0 for fewer than two answers.

    Our reading: the source does not divide by the length.
    """
    pairs = list(combinations(answers, 2))
    if not pairs:
        return 0.0
    return sum(levenshtein(a, b) / max(len(a), len(b), 1) for a, b in pairs) / len(pairs)


DIVERSITY: dict[str, Callable[[Sequence[Tokens]], float]] = {
    "1-self_bleu_123": one_minus_self_bleu_123,
    "distinct_3": distinct_3,
    "edit_distance": edit_distance,
}
