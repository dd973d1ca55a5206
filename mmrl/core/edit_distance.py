"""Edit distance between texts or lists of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def levenshtein(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Count the insertions, deletions and replacements between two texts or two lists of tokens.

    Myers' bit-parallel algorithm (in the form of Hyyrö, 2003) on Python integers, whose bits mark where a
    column of the dynamic-programming table increases and where it decreases.
    """
    if not first:
        return len(second)
    where: dict[Hashable, int] = {}  # token -> bit mask of its positions
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
