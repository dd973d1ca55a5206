"""Counting what a description gets right: CHAIR (arXiv 1809.02156), Object HalBench by rules (RLAIF-V, arXiv
2405.17220), and precision and recall over any closed ontology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.vision.benchmarks.object_vocabulary import Mention, Ontology

COUNTS = (
    "mentions",  # of objects, with repeats
    "hallucinated",  # mentions of what is not there, with repeats
    "correct",  # classes that are there and mentioned, each once
    "truth",  # classes that are there
    "mentioning",  # 1 if anything is mentioned
    "hallucinating",  # 1 if anything is mentioned that is not there
    "clean",  # 1 if not
    "matched",  # tempting classes that are mentioned, each once
    "tempting",  # classes that are not there, but might be expected
)


@dataclass(frozen=True)
class Scene:
    """What is in a picture, and what is temptingly not, as classes of an ontology."""

    objects: frozenset[str]
    ontology: Ontology
    absent: frozenset[str] = frozenset()

    def counts(self, text: str) -> dict[str, float]:
        """Count what a description mentions, under the names of `COUNTS`."""
        return count(self.ontology.mentions(text), self.objects, self.absent)


def count(
    mentions: Sequence[Mention], objects: frozenset[str], absent: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Count mentions against what is there. Precision counts repeats, recall counts classes, as the script of
    Object HalBench does."""
    named = {mention.name for mention in mentions}
    wrong = sum(mention.name not in objects for mention in mentions)
    return tallied(len(mentions), wrong, len(named & objects), len(objects), len(named & absent), len(absent))


def tallied(
    mentions: int, wrong: int, correct: int, truth: int, matched: int, tempting: int
) -> dict[str, float]:
    """Put counts under the names of `COUNTS`."""
    values = (mentions, wrong, correct, truth, mentions > 0, wrong > 0, wrong == 0, matched, tempting)
    return {name: float(value) for name, value in zip(COUNTS, values, strict=True)}


def describe(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute all metrics of a corpus, as shares. A ratio over nothing is 0 (the scripts divide by zero).

    CHAIRs is the share of captions with a hallucination, CHAIRs_refine that among captions that mention
    anything, CHAIRi the share of hallucinated mentions; precision is 1 - CHAIRi.
    """
    total = {name: sum(one[name] for one in counted) for name in COUNTS}
    precision = 1 - ratio(total["hallucinated"], total["mentions"])
    recall = ratio(total["correct"], total["truth"])
    return {
        "CHAIRs": ratio(total["hallucinating"], len(counted)),
        "CHAIRs_refine": ratio(total["hallucinating"], total["mentioning"]),
        "CHAIRi": ratio(total["hallucinated"], total["mentions"]),
        "precision": precision,
        "recall": recall,
        "f1": ratio(2 * precision * recall, precision + recall),
        "tempted": ratio(total["matched"], total["tempting"]),
    }


def ratio(top: float, bottom: float) -> float:
    """Divide; 0 over nothing."""
    return top / bottom if bottom else 0.0
