"""Edit distances equal those of the textbook's table."""

from __future__ import annotations

import random

from mmrl.core.edit_distance import levenshtein


def textbook(first, second):
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        before, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


def test_edit_distances_are_those_of_the_table():
    generator = random.Random(0)
    for _ in range(300):
        pair = [[generator.randrange(4) for _ in range(generator.randrange(90))] for _ in range(2)]
        assert levenshtein(*pair) == textbook(*pair)
    assert levenshtein([], [1, 2]) == levenshtein([1, 2], []) == 2
