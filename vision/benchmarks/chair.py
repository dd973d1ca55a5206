"""Object hallucination counts: CHAIR (arXiv 1809.02156), Object HalBench (RLAIF-V, arXiv 2405.17220), and
precision and recall over any closed vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.vision.benchmarks.object_vocabulary import Mention, Ontology

COUNTS = (
    "mentions",  # of objects, with repeats
    "hallucinated",  # mentions of absent objects, with repeats
    "correct",  # present classes that are mentioned, each once
    "truth",  # present classes
    "mentioning",  # 1 if any object is mentioned
    "hallucinating",  # 1 if any absent object is mentioned
    "clean",  # 1 if none is
    "matched",  # tempting classes that are mentioned, each once
    "tempting",  # absent classes that models tend to expect
)


@dataclass(frozen=True)
class Scene:
    """Classes of an ontology that an image shows, and absent classes that models tend to expect."""

    objects: frozenset[str]
    ontology: Ontology
    absent: frozenset[str] = frozenset()

    def counts(self, text: str) -> dict[str, float]:
        """Count the object mentions of a description, under the names of `COUNTS`."""
        return count(self.ontology.mentions(text), self.objects, self.absent)


def count(
    mentions: Sequence[Mention], objects: frozenset[str], absent: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Count mentions against the present objects, under the names of `COUNTS`.

    Precision counts repeats, recall counts classes, as Object HalBench's script does.
    """
    named = {mention.name for mention in mentions}
    wrong = sum(mention.name not in objects for mention in mentions)
    return named_counts(
        len(mentions), wrong, len(named & objects), len(objects), len(named & absent), len(absent)
    )


def named_counts(
    mentions: int, wrong: int, correct: int, truth: int, matched: int, tempting: int
) -> dict[str, float]:
    """Map the names of `COUNTS` to counts."""
    values = (mentions, wrong, correct, truth, mentions > 0, wrong > 0, wrong == 0, matched, tempting)
    return {name: float(value) for name, value in zip(COUNTS, values, strict=True)}


def ratio(numerator: float, denominator: float) -> float:
    """Divide; 0 where the denominator is 0."""
    return numerator / denominator if denominator else 0.0
