"""AMBER (arXiv 2311.07397): word lists and object counts of descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmrl.vision.benchmarks.caption_words import singular, tokens
from mmrl.vision.benchmarks.chair import named_counts

GENERATIVE = "generative"
# The question types that each dimension pools.
DIMENSIONS = {
    "existence": ("discriminative-hallucination",),
    "state": ("discriminative-attribute-state",),
    "number": ("discriminative-attribute-number",),
    "action": ("discriminative-attribute-action",),
    "attribute": tuple(f"discriminative-attribute-{kind}" for kind in ("state", "number", "action")),
    "relation": ("discriminative-relation", "relation"),
}


@dataclass(frozen=True)
class Words:
    """AMBER's word lists: associated words, and safe words that never count as hallucinated.

    `nouns` extracts the nouns of a text as lemmas; the script uses nltk. The default takes every word in its
    singular, since only words of the vocabulary count anyway: our reading. `similar` decides whether two
    words mean about the same; the script uses spaCy's vectors (cosine above 0.8). Without it this step is
    skipped.
    """

    association: Mapping[str, Sequence[str]]
    safe: frozenset[str] = frozenset()
    nouns: Callable[[str], Sequence[str]] = lambda text: [singular(word) for word in tokens(text)]
    similar: Callable[[str, str], bool] | None = None

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """Collect every word of the associations."""
        return frozenset(self.association) | {word for words in self.association.values() for word in words}


@dataclass(frozen=True)
class AmberScene:
    """Objects of an AMBER image (`truth`), and absent objects that models tend to invent (`absent`)."""

    truth: tuple[str, ...]
    absent: tuple[str, ...]
    words: Words

    def counts(self, text: str) -> dict[str, float]:
        """Count the nouns of a description, under the names of `chair.COUNTS`.

        A safe noun stays in the denominator. A noun of the image, or associated with an object of it, covers
        that object. Any other noun may match an absent object by name and by meaning, and is hallucinated
        unless it means about the same as an object of the image, which it then covers.
        """
        there, tempting = self._targets(self.truth), self._targets(self.absent)
        nouns = [noun for noun in self.words.nouns(text) if noun in self.words.vocabulary]
        similar = self.words.similar or (lambda noun, word: False)
        covered: set[int] = set()
        matched: set[int] = set()
        wrong = 0
        for noun in nouns:
            if noun in self.words.safe:
                continue
            known = _first(there, lambda word, noun=noun: word == noun)
            if not known:
                alike = lambda word, noun=noun: similar(noun, word)
                matched |= _first(tempting, lambda word, noun=noun: word == noun)
                matched |= _first(tempting, alike)
                known = _first(there, alike)
                wrong += not known
            covered |= known
        return named_counts(len(nouns), wrong, len(covered), len(self.truth), len(matched), len(self.absent))

    def _targets(self, names: Sequence[str]) -> list[tuple[str, int]]:
        """List (word, index of its object) in the script's look-up order: associations first."""
        words = [(word, i) for i, name in enumerate(names) for word in self.words.association.get(name, ())]
        return words + [(name, i) for i, name in enumerate(names)]


def _first(targets: Sequence[tuple[str, int]], accepts: Callable[[str], bool]) -> set[int]:
    """Return the object of the first accepted word, as a set of at most one index."""
    return next(({i} for word, i in targets if accepts(word)), set())
