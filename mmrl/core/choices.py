"""Parsers for multiple choice: find the choice that an answer names by letter, text or index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.core.answer_text import plain
from mmrl.core.answers import NEGATED, readable, same_words, words_of

_PHRASE = r"(?:(?:the |final |correct )*+(?:answer|option|choice)(?: is)?\s?[:=]?\s?\(?)?"
_ALONE = re.compile(rf"[\s\"'(\[]*+{_PHRASE}([^\W\d_])[\s\"').,:;!\]]*+", re.IGNORECASE)
_LEADING = re.compile(
    r"[\s\"'(\[]*+([A-Z])(?:\s?[).:\]]|\s-\s|\s*\n|,?\s(?=because\b|since\b|as\b))(?![A-Z]\.)"
)
_OPTIONS = re.compile(r"^\W*[A-Z]\s?[).:]", re.MULTILINE)
# In scripts without spaces between words, such as Chinese, a character may stand directly beside a letter.
_SPACELESS = "\u2e80-\u9fff\uac00-\ud7a3"
_WORD = rf"[^\W{_SPACELESS}]"
_LETTER = re.compile(rf"(?<!{_WORD})(?<!')(?<!\w-)(?<!\b[A-Z]\.)([A-Z])(?!['+#*=]|{_WORD}|-\w|\.[A-Z])")
_NAMED = re.compile(r"(?:answer|option|choice)(?: is|:)*\s*\(?([A-Z])(?![\w'+#*]|-\w)", re.IGNORECASE)
_AFTER = {"is", "was", "are", "and", "or", "because", "since", "as", "not", "but", "seems", "fits", "matches"}
_JOINED = r"[\s()\[\].]*(?:(?:,|;|/|&|\b(?:and|or|nor)\b)[\s()\[\]]*)*"
_SEVERAL = re.compile(rf"[\s(\[]*[A-Z](?:{_JOINED}\b[A-Z]\b)+[\s.)\]]*")
# A letter after such text is not an answer. The text is a negation, or a noun as in "vitamin C".
_DENIED = re.compile(
    rf"(?:{NEGATED}|\b(?:except|nor|neither|unlike|vitamin|hepatitis|type|grade)) "
    r"(?:the |for |option |choice |answer |be )*\(?",
    re.IGNORECASE,
)


def letter_in(text: str) -> str:
    """Parse the letter of the chosen option from an answer; empty without one.

    Rules, in order: the only letter, the letter after "answer", a leading letter as in "B. red", the last
    single capital. The article A, the pronoun I, a negated letter ("not B") and lists such as "A, C" or
    "A or B" do not count.
    """
    text = readable(text).strip()
    if alone := _ALONE.fullmatch(text):
        return alone[1].upper()
    if _SEVERAL.fullmatch(text):
        return ""
    named = [match for match in _NAMED.finditer(text) if match[1].isupper() and not _is_word(match, text)]
    if not named and (leading := _LEADING.match(text)) and len(_OPTIONS.findall(text)) < 2:
        return leading[1]
    letters = [match for match in _LETTER.finditer(text) if not _is_word(match, text)]
    if not (chosen := [match for match in named or letters if not _denied(text[: match.start(1)])][-1:]):
        return ""
    start, end = chosen[0].span(1)
    for one, other in zip(letters, letters[1:], strict=False):
        between = text[one.end(1) : other.start(1)]
        beside = one[1] != other[1] and "." not in between and re.fullmatch(_JOINED, between)
        if beside and start in (one.start(1), other.start(1)):
            return ""
    return text[start:end]


def _denied(before: str) -> bool:
    """Whether a text ends with a negation such as "not", "isn't" or "rather than"."""
    return any(match.end() == len(before) for match in _DENIED.finditer(before, max(0, len(before) - 60)))


def _is_word(match: re.Match, text: str) -> bool:
    """Whether a capital is the article A or the pronoun I."""
    if match[1] not in "AI":
        return False
    follows = re.match(r" ([a-z]+)", text[match.end() : match.end() + 20])
    return bool(follows and follows[1] not in _AFTER)


def choices_in(columns: Mapping[str, Any]) -> dict[str, str]:
    """Map the labels of a row's choices to texts; reads a list, a mapping, or ARC's `text` and `label`."""
    choices = columns.get("choices")
    choices = columns.get("options") if choices is None else choices
    match choices:
        case {"text": [*texts], "label": [*labels]} if len(texts) == len(labels):
            return {str(label): str(text) for label, text in zip(labels, texts, strict=True)}
        case Mapping():
            return {str(label): str(text) for label, text in choices.items() if text is not None}
        case [*texts]:
            return {chr(ord("A") + i): _unlettered(str(text), i) for i, text in enumerate(texts[:26])}
    return {}


def _unlettered(text: str, place: int) -> str:
    """Remove the letter from the text of choice number `place`: "A. red" becomes "red"."""
    lettered = _LEADING.match(text)
    return text[lettered.end() :] if lettered and lettered[1] == chr(ord("A") + place) else text


def choice_in(text: str, choices: Mapping[str, str]) -> str:
    """Return the label of the choice that an answer or target names; empty without any.

    A choice is named by its text, its letter, its index from 0, or as the only choice whose text occurs in
    the answer.
    """
    words = words_of(text)
    words_by_label = {label: words_of(choice) for label, choice in choices.items()}
    equal = [label for label, choice in words_by_label.items() if same_words(words, choice)]
    if equal:
        return equal[0]
    labels, letter = {label.upper(): label for label in choices}, letter_in(text)
    if letter in labels:
        return labels[letter]
    if place := re.fullmatch(r"[\s(]*([0-9]{1,3})[\s).]*", plain(text)):
        numbered = list(choices)[int(place[1]) : int(place[1]) + 1]
        return place[1] if place[1] in choices else (numbered or [""])[0]  # a numeric label, else an index
    joined = f" {' '.join(words)} "
    named = [
        label
        for label, choice in words_by_label.items()
        if choice and (at := joined.rfind(f" {' '.join(choice)} ")) >= 0 and not _denied(joined[: at + 1])
    ]
    sets = {label: set(words_by_label[label]) for label in named}
    longest = [a for a in named if not any(a != b and sets[a] < sets[b] for b in named)]
    return longest[0] if len(longest) == 1 else ""
