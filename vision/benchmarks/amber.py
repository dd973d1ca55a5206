"""AMBER, a benchmark of hallucinations (arXiv 2311.07397): its word lists, and object counts of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import eq

from mmrl.vision.benchmarks.caption_words import singular, tokens
from mmrl.vision.benchmarks.chair import named_counts

GENERATIVE = "generative"
# Maps a dimension of AMBER to its question types; metrics are computed over all types together.
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

    `nouns` extracts the nouns of a text as lemmas; AMBER's script uses nltk. The default returns all words in
    the singular, because only words of `vocabulary` are counted (our reading). `similar` decides whether two
    words have about the same meaning. AMBER uses spaCy's vectors (cosine above 0.8); the default is never.
    """

    association: Mapping[str, Sequence[str]]
    safe: frozenset[str] = frozenset()
    nouns: Callable[[str], Sequence[str]] = lambda text: [singular(word) for word in tokens(text)]
    similar: Callable[[str, str], bool] = lambda noun, word: False

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """The set of all words in `association`: its keys and their associated words."""
        return frozenset(self.association).union(*self.association.values())


@dataclass(frozen=True)
class AmberScene:
    """Target of an AMBER image: its objects (`truth`), and absent objects that models tend to invent."""

    truth: tuple[str, ...]
    absent: tuple[str, ...]
    words: Words

    def counts(self, text: str) -> dict[str, float]:
        """Count the nouns of a description. The keys of the result are the names in `chair.COUNTS`.

        Safe nouns count only as mentions. A noun covers an object of the image if it names the object, is
        associated with it or, failing that, has about the same meaning. A noun that covers nothing is
        hallucinated. A noun without a named or associated object in the image may match an absent object.
        """
        similar, covered, matched, hallucinated = self.words.similar, set(), set(), 0
        # Words outside the vocabulary do not count, not even as mentions.
        nouns = [noun for noun in self.words.nouns(text) if noun in self.words.vocabulary]
        for noun in nouns:
            if noun in self.words.safe:
                continue
            objects = self._named(self.truth, noun, eq)
            if not objects:
                matched |= self._named(self.absent, noun, eq) | self._named(self.absent, noun, similar)
                objects = self._named(self.truth, noun, similar)
                hallucinated += not objects  # every mention counts, even repeated ones
            covered |= objects  # a set: each object counts once, even if it is named several times
        sizes = len(covered), len(self.truth), len(matched), len(self.absent)
        return named_counts(len(nouns), hallucinated, *sizes)

    def _named(self, objects: Sequence[str], noun: str, same: Callable[[str, str], bool]) -> set[int]:
        """Return the index of the object that a noun names, as a set with at most one element.

        As in AMBER's script, the associated words of all objects are tried first, then the object names.
        """
        words = [(word, i) for i, name in enumerate(objects) for word in self.words.association.get(name, ())]
        words += [(name, i) for i, name in enumerate(objects)]
        return next(({i} for word, i in words if same(noun, word)), set())
