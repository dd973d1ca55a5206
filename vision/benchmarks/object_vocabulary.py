"""Object vocabularies (ontologies): maps from words and phrases to a closed set of object classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from mmrl.config.registry import import_name
from mmrl.vision.benchmarks.caption_words import singular, tokens

# Two-word phrases that CHAIR joins into one word, including phrases that name no class.
CHAIR_PHRASES = (
    "motor bike", "motor cycle", "air plane", "traffic light", "street light", "traffic signal",
    "stop light", "fire hydrant", "stop sign", "parking meter", "suit case", "sports ball",
    "baseball bat", "baseball glove", "tennis racket", "wine glass", "hot dog", "cell phone",
    "mobile phone", "teddy bear", "hair drier", "potted plant", "laptop computer", "home plate",
    "train track",
)  # fmt: skip
REFINED_PHRASES = ("home plate", "train track")
ANIMALS = (
    "bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal",
    "cub",
)  # fmt: skip
VEHICLES = ("jet", "train")


class Mention(NamedTuple):
    """A mention of an object in an answer: the word or phrase, and the class it names."""

    word: str
    name: str


@dataclass(frozen=True)
class Ontology:
    """Maps words and phrases to object classes.

    Args:
        names: Maps words to their classes.
        phrases: Maps phrases of several words to a replacement.
        unless: Maps a word to other words. The word is ignored in a text that contains any of them.
        singular: Function that converts a noun to its singular.
        plurals: Whether class names may be plurals, such as scissors.
    """

    names: Mapping[str, str]
    phrases: Mapping[str, str]
    unless: Mapping[str, Sequence[str]] = field(default_factory=dict)
    singular: Callable[[str], str] = singular
    plurals: bool = True

    def mentions(self, text: str) -> list[Mention]:
        """List the object mentions of a text, in order and with repeats.

        The text is lower-cased, tokenised and converted to singular forms. Then phrases are joined from left
        to right, the longest first.
        """
        raw = tokens(text.lower())
        words = [self.singular(word) for word in raw]
        longest = max((phrase.count(" ") + 1 for phrase in self.phrases), default=1)
        joined, at = [], 0
        while at < len(words):
            for end in range(min(at + longest, len(words)), at + 1, -1):  # phrases of two or more words
                phrase = " ".join(words[at:end])
                if phrase in self.phrases:
                    joined.append(self.phrases[phrase])
                    at = end
                    break
            else:
                plural = self.plurals and words[at] not in self.names  # class names may be plural: scissors
                joined.append(raw[at] if plural else words[at])
                at += 1
        return [
            Mention(word, self.names[word])
            for word in joined
            if word in self.names and not any(other in joined for other in self.unless.get(word, ()))
        ]

    def name_of(self, word: str) -> str:
        """Return the class that a word or phrase names; raise `ValueError` if there is none."""
        name = self.names.get(word) or self.names.get(" ".join(map(self.singular, word.lower().split())))
        if name is None:
            classes = len(set(self.names.values()))
            raise ValueError(f"'{word}' names no class of the ontology, which has {classes}")
        return name


def read_ontology(
    path: Path, style: Literal["chair", "refined"] = "chair", singular_by: str = ""
) -> Ontology:
    """Read an ontology from a list of synonyms in CHAIR's format (.txt), or from JSON.

    A list of synonyms has one class per line: its name, then its synonyms. JSON is like `{"objects": {name:
    [synonyms]}, "phrases": {phrase: replacement or null}, "unless": {word: [words]}}`. Names and synonyms of
    several words also become phrases.

    Args:
        path: The file of the ontology.
        style: Which phrases of a list of synonyms to join. `chair`: the fixed phrases of CHAIR's script.
            `refined`: the phrases of the list, as in Object HalBench.
        singular_by: Function to use for singular forms instead of ours, given as `module:function`.
    """
    by = function_of(singular_by) if singular_by else singular
    try:
        source = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the ontology '{path}': {error}") from error
    if path.suffix == ".txt":
        return _from_synonyms(source, style, by)
    try:
        raw = json.loads(source)
        objects = {str(name): [str(word) for word in words] for name, words in raw["objects"].items()}
        # A null replacement becomes an empty word, which names no class.
        phrases = {str(k).lower(): str(v or "").lower() for k, v in raw.get("phrases", {}).items()}
        unless = {str(k).lower(): [w.lower() for w in v] for k, v in raw.get("unless", {}).items()}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        wanted = '{"objects": {name: [synonyms]}}'
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"'{path}' is no ontology; wanted {wanted}: {reason}") from error
    return ontology_of(objects, phrases, unless, by)


def ontology_of(
    objects: Mapping[str, Sequence[str]],
    phrases: Mapping[str, str] | None = None,
    unless: Mapping[str, Sequence[str]] | None = None,
    by: Callable[[str], str] = singular,
) -> Ontology:
    """Build an ontology from a map of classes to their synonyms."""
    names: dict[str, str] = {}
    for name, words in objects.items():
        for word in (name, *words):
            first = names.setdefault(word.lower(), name)
            if first != name:
                raise ValueError(f"'{word}' names two classes of the ontology: '{first}' and '{name}'")
    joined = {word: word for word in names if " " in word} | dict(phrases or {})
    # Phrases are joined after conversion to singular forms, so add the singular form of every phrase.
    joined |= {" ".join(map(by, phrase.split())): word for phrase, word in joined.items()}
    return Ontology(names, joined, unless or {}, by)


def _from_synonyms(text: str, style: str, by: Callable[[str], str]) -> Ontology:
    classes = [line.strip().split(", ") for line in text.splitlines() if line.strip()]
    if style == "refined":
        classes = [[word.strip() for word in words] for words in classes]
    # If a word is in two lines of the published list, the later line wins, as in the scripts. CHAIR's list
    # has an extra space before two words (motor bike and cheesecake), which therefore never match.
    names = {word: words[0] for words in classes for word in words if word}
    # Object HalBench's script joins only two words at a time, so longer phrases of its list never match.
    pairs = [word for word in names if word.count(" ") == 1]
    joined = (*pairs, *REFINED_PHRASES) if style == "refined" else CHAIR_PHRASES
    phrases = {phrase: phrase for phrase in joined}
    phrases |= {f"{kind} {animal}": animal for animal in ANIMALS for kind in ("baby", "adult")}
    phrases |= {f"passenger {vehicle}": vehicle for vehicle in VEHICLES}
    # The Python package `pattern`, used by the scripts, converts glass to glas.
    phrases |= {"bow tie": "tie", "toilet seat": "toilet", "wine glas": "wine glass"}
    # The scripts ignore the word seat in a text that mentions a toilet.
    return Ontology(names, phrases, {"seat": ("toilet",)}, by, plurals=False)


def function_of(name: str) -> Callable:
    """Import the function with the name `module:function`."""
    try:
        return import_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import '{name}', wanted as module:function: {error}") from error
