"""AMBER (arXiv 2311.07397): its files, how it counts nouns, and the numbers its script prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmrl.vision.benchmarks.caption_words import singular, tokens
from mmrl.vision.benchmarks.chair import tallied
from mmrl.vision.benchmarks.yes_no_answers import NO, Form, parse_yes_no

GENERATIVE = "generative"
# The types of questions that each dimension pools.
DIMENSIONS = {
    "existence": ("discriminative-hallucination",),
    "state": ("discriminative-attribute-state",),
    "number": ("discriminative-attribute-number",),
    "action": ("discriminative-attribute-action",),
    "attribute": tuple(f"discriminative-attribute-{kind}" for kind in ("state", "number", "action")),
    "relation": ("discriminative-relation", "relation"),
}
START = 0.001  # what the script begins its denominators with
STARTS = {"attribute": 3 * START}  # it adds up three of them, each with a start of its own
Similar = Callable[[str, str], bool]


@dataclass(frozen=True)
class Words:
    """What AMBER knows about words: which are associated, and which are never counted as hallucinated.

    `nouns` finds the nouns of a text as lemmas; the script takes nltk's. Ours takes every word, brought to
    the singular, since only those of the vocabulary count anyway: our reading. `similar` tells words that
    mean about the same; the script takes spaCy's vectors (cosine above 0.8). Without it this step is left
    out.
    """

    association: Mapping[str, Sequence[str]]
    safe: frozenset[str] = frozenset()
    nouns: Callable[[str], Sequence[str]] = lambda text: [singular(word) for word in tokens(text)]
    similar: Similar | None = None

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        """Collect every word of the associations."""
        return frozenset(self.association) | {word for words in self.association.values() for word in words}


@dataclass(frozen=True)
class Described:
    """What is in a picture of AMBER, and what is temptingly not."""

    truth: tuple[str, ...]
    absent: tuple[str, ...]
    words: Words

    def counts(self, text: str) -> dict[str, float]:
        """Count the nouns of a description, under the names of `scenes.COUNTS`.

        A noun that is never counted stays in the denominator. One that is in the picture, or associated with
        what is, covers it. Any other may match what is tempting, by name and by meaning, and is hallucinated
        unless it means about the same as something in the picture, which it then covers.
        """
        there, tempting = self._targets(self.truth), self._targets(self.absent)
        nouns = [noun for noun in self.words.nouns(text) if noun in self.words.vocabulary]
        covered: set[int] = set()
        matched: set[int] = set()
        wrong = 0
        for noun in nouns:
            if noun in self.words.safe:
                continue
            known = _first(there, lambda word, noun=noun: word == noun)
            if not known:
                matched |= _first(tempting, lambda word, noun=noun: word == noun)
                matched |= self._alike(tempting, noun)
                known = self._alike(there, noun)
                wrong += not known
            covered |= known
        return tallied(len(nouns), wrong, len(covered), len(self.truth), len(matched), len(self.absent))

    def _targets(self, names: Sequence[str]) -> list[tuple[str, int]]:
        """List the words that stand for each name, in the order the script looks them up: associations
        first."""
        words = [(word, at) for at, name in enumerate(names) for word in self.words.association.get(name, ())]
        return words + [(name, at) for at, name in enumerate(names)]

    def _alike(self, targets: Sequence[tuple[str, int]], noun: str) -> set[int]:
        similar = self.words.similar
        return set() if similar is None else _first(targets, lambda word: similar(noun, word))


def _first(targets: Sequence[tuple[str, int]], holds: Callable[[str], bool]) -> set[int]:
    """Find what the first word that holds stands for."""
    return next(({at} for word, at in targets if holds(word)), set())


def dimension_of(type_: str) -> Iterator[str]:
    """Name the dimensions that a type of question belongs to."""
    return (name for name, types in DIMENSIONS.items() if type_ in types)


def evaluate(
    responses: Sequence[Mapping[str, Any]],
    annotations: Sequence[Mapping[str, Any]],
    words: Words,
    *,
    official: bool = True,
    form: Form = "exact",
) -> dict[str, float]:
    """Compute the numbers of AMBER's script for `[{"id", "response"}]`, in percent; ids count from 1.

    `official` starts denominators at 0.001 (those of `attribute`, which pools three counts, at 0.003), adds
    to that of F1, and rounds to one decimal, precision and recall before F1. Dimensions without an answer
    are left out. `AMBER` is the paper's summary, which the script does not print.
    """
    counted: list[dict[str, float]] = []
    asked: dict[str, list[tuple[float, float]]] = {}
    for given in responses:
        item = annotations[given["id"] - 1]
        if item["type"] == GENERATIVE:
            counted.append(Described((*item["truth"],), (*item["hallu"],), words).counts(given["response"]))
            continue
        pair = parse_yes_no(given["response"], form), float(item["truth"] == "yes")
        for name in ("discriminative", *dimension_of(item["type"])):
            asked.setdefault(name, []).append(pair)
    found = _generative(counted, official) if counted else {}
    for name, pairs in asked.items():
        found |= {f"{name}/{key}": v for key, v in _discriminative(pairs, name, official).items()}
    if counted and asked:
        found["AMBER"] = (100 - found["CHAIR"] + found["discriminative/f1"]) / 2
    return found


def _generative(counted: Sequence[Mapping[str, float]], official: bool) -> dict[str, float]:
    def share(top: str, bottom: str) -> float:
        bottoms = sum(one[bottom] for one in counted)
        return _percent(sum(one[top] for one in counted), bottoms, START, official)

    clean = sum(one["clean"] for one in counted)
    hal = 100 - 100 * clean / (len(counted) + START * official)
    return {
        "CHAIR": share("hallucinated", "mentions"),
        "Cover": share("correct", "truth"),
        "Hal": round(hal, 1) if official else hal,
        "Cog": share("matched", "tempting"),
    }


def _discriminative(pairs: Sequence[tuple[float, float]], name: str, official: bool) -> dict[str, float]:
    """Count with no as the positive class: it is the answer that a hallucinating model misses."""
    both = sum(given == true == NO for given, true in pairs)
    start = STARTS.get(name, START)
    accuracy = _percent(sum(given == true for given, true in pairs), len(pairs), start, official)
    precision = _percent(both, sum(given == NO for given, _ in pairs), start, official)
    recall = _percent(both, sum(true == NO for _, true in pairs), start, official)
    extra = (0.001 if name == "existence" else 0.0001) * official
    bottom = (precision + recall) / 100 + extra
    f1 = 2 * precision * recall / 100 / bottom if bottom else 0.0
    return {
        "accuracy": accuracy,
        "precision": precision,
        "recall": recall,
        "f1": round(f1, 1) if official else f1,
    }


def _percent(top: float, bottom: float, start: float, official: bool) -> float:
    bottom += start * official
    value = 100 * top / bottom if bottom else 0.0
    return round(value, 1) if official else value
