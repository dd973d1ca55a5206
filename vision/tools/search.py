"""A tool that searches the texts of a file, such as captions of images, without network access."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import tool
from mmrl.data.dataset_io import valid_rows
from mmrl.data.fields import RowError, text

K1, B = 1.2, 0.75  # BM25: saturation of repeated words, and length normalisation


@tool
def search(query: str, *, path: str, column: str = "caption", most: PositiveInt = 3) -> str:
    """Search a collection of texts, and list those that fit best.

    Args:
        query: Words that the texts should have.
        path: The file or folder of rows to search.
        column: The column with the texts.
        most: The most texts that are listed.
    """
    index = read_index(path, column, Path(path).stat().st_mtime_ns)
    places = index.search(query)[:most]
    return "\n".join(index.texts[place] for place in places) or "nothing was found"


@dataclass(frozen=True)
class Index:
    """A BM25 index of a collection of texts."""

    texts: tuple[str, ...]
    counts: tuple[Counter[str], ...]  # word counts of each text
    having: Counter[str]  # number of texts that contain a word
    average: float  # mean number of words per text

    def search(self, query: str) -> list[int]:
        """Return the indices of all texts that share a word with the query, the best first; ties by index."""
        scores = [self.score(query, place) for place in range(len(self.texts))]
        return sorted((i for i, score in enumerate(scores) if score), key=lambda i: -scores[i])

    def score(self, query: str, place: int) -> float:
        """Score a text with BM25 (Robertson and Zaragoza 2009), using an IDF that is never negative."""
        counts, score = self.counts[place], 0.0
        for word in dict.fromkeys(words_of(query)):
            if counts[word]:
                having = self.having[word]
                rarity = math.log(1 + (len(self.texts) - having + 0.5) / (having + 0.5))
                length = K1 * (1 - B + B * counts.total() / self.average)
                score += rarity * counts[word] * (K1 + 1) / (counts[word] + length)
        return score


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


@lru_cache(maxsize=8)
def read_index(path: str, column: str, changed: int) -> Index:
    """Read and index the texts of a column; `changed`, the file's time stamp, is part of the cache key.

    Raises RowError for a row without the text, and for a file without rows.
    """
    texts = tuple(text(row.columns.get(column), column) for row in valid_rows(Path(path)))
    if not texts:
        raise RowError(f"'{path}' has no rows to search")
    counts = tuple(Counter(words_of(each)) for each in texts)
    having = Counter(word for each in counts for word in each)
    return Index(texts, counts, having, sum(each.total() for each in counts) / len(texts))
