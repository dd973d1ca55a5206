"""Counts of hallucinated objects: CHAIR (arXiv 1809.02156), Object HalBench (RLAIF-V, arXiv 2405.17220)."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.vision.benchmarks.object_vocabulary import Ontology

COUNTS = (
    "mentions",  # of objects, with repeats
    "hallucinated",  # mentions of absent objects, with repeats
    "correct",  # present classes that are mentioned, each once
    "truth",  # present classes
    "mentioning",  # 1 if any object is mentioned
    "hallucinating",  # 1 if any absent object is mentioned
    "clean",  # 1 if no absent object is mentioned
    "matched",  # tempting classes that are mentioned, each once
    "tempting",  # absent classes that models tend to invent
)


@dataclass(frozen=True)
class Scene:
    """Classes of an ontology in an image, and absent classes that models tend to invent."""

    objects: frozenset[str]
    ontology: Ontology
    absent: frozenset[str] = frozenset()

    def counts(self, text: str) -> dict[str, float]:
        """Count the object mentions of a description, under the names of `COUNTS`."""
        names = [mention.name for mention in self.ontology.mentions(text)]
        hallucinated = sum(name not in self.objects for name in names)
        correct, matched = len(self.objects.intersection(names)), len(self.absent.intersection(names))
        sizes = correct, len(self.objects), matched, len(self.absent)
        return named_counts(len(names), hallucinated, *sizes)


def named_counts(
    mentions: int, hallucinated: int, correct: int, truth: int, matched: int, tempting: int
) -> dict[str, float]:
    """Return counts by the names of `COUNTS`."""
    flags = mentions > 0, hallucinated > 0, hallucinated == 0
    values = (mentions, hallucinated, correct, truth, *flags, matched, tempting)
    return {name: float(value) for name, value in zip(COUNTS, values, strict=True)}


def ratio(numerator: float, denominator: float) -> float:
    """Divide; 0 where the denominator is 0."""
    return numerator / denominator if denominator else 0.0
