"""Counts of hallucinated objects: CHAIR (arXiv 1809.02156), Object HalBench (RLAIF-V, arXiv 2405.17220)."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.vision.benchmarks.object_vocabulary import Ontology

COUNTS = (
    "mentions",  # mentions of any object, with repeats
    "hallucinated",  # mentions of absent objects, with repeats
    "correct",  # present classes that are mentioned; each class counts once
    "truth",  # number of present classes
    "mentioning",  # 1 if any object is mentioned
    "hallucinating",  # 1 if any absent object is mentioned
    "clean",  # 1 if no absent object is mentioned
    "matched",  # classes of `tempting` that are mentioned; each class counts once
    "tempting",  # number of absent classes that models tend to invent
)


@dataclass(frozen=True)
class Scene:
    """Object classes of an image (`objects`), and absent classes that models tend to invent (`absent`)."""

    objects: frozenset[str]
    ontology: Ontology
    absent: frozenset[str] = frozenset()

    def counts(self, text: str) -> dict[str, float]:
        """Count the objects that a description mentions. The keys of the result are the names in `COUNTS`."""
        names = [mention.name for mention in self.ontology.mentions(text)]
        hallucinated = sum(name not in self.objects for name in names)
        correct, matched = len(self.objects.intersection(names)), len(self.absent.intersection(names))
        sizes = correct, len(self.objects), matched, len(self.absent)
        return named_counts(len(names), hallucinated, *sizes)


def named_counts(
    mentions: int, hallucinated: int, correct: int, truth: int, matched: int, tempting: int
) -> dict[str, float]:
    """Return a dictionary of counts with the names in `COUNTS` as keys."""
    flags = mentions > 0, hallucinated > 0, hallucinated == 0
    values = (mentions, hallucinated, correct, truth, *flags, matched, tempting)
    return {name: float(value) for name, value in zip(COUNTS, values, strict=True)}


def ratio(numerator: float, denominator: float) -> float:
    """Divide two numbers; return 0 if the denominator is 0."""
    return numerator / denominator if denominator else 0.0
