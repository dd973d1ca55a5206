"""Parsers of yes/no answers, as in POPE (arXiv 2305.10355) and AMBER (arXiv 2311.07397)."""

from __future__ import annotations

import re
from typing import Literal

from mmrl.core.answer_text import answer_part, spelled

YES, NO, NEITHER = 1.0, 0.0, -1.0
Form = Literal["pope", "exact", "first_word"]
_BOTH = r"(?:yes|no)\s*(?:/|\b(?:or|and|nor)\b)\s*(?:yes|no)\b"
# The first yes or no. The group `word` is empty for "yes or no" and for a negation such as "not yes".
FIRST = re.compile(
    rf"\b(?:(?:not|neither|cannot say|can't say)\s+(?:yes|no)\b|{_BOTH}|(?P<word>yes|no)\b)", re.IGNORECASE
)


def parse_yes_no(text: str, form: Form = "pope") -> float:
    """Parse a yes/no answer: 1 for yes, 0 for no, -1 for neither.

    `pope`: no if a word before the first full stop is No, no or not, else yes, as in POPE's script (arXiv
    2305.10355). So "Yes, there is no doubt." means no, and an empty answer means yes. `exact`: only the texts
    Yes and No are accepted, as in AMBER's script (arXiv 2311.07397). `first_word`: the first yes or no in any
    case, in the last answer block if there is one. "yes or no" and "not yes" then mean neither.
    """
    if form == "pope":
        words = text.partition(".")[0].replace(",", "").split(" ")  # as in the script: splits only at spaces
        return NO if {"No", "no", "not"} & {*words} else YES
    if form == "exact":
        return {"Yes": YES, "No": NO}.get(text, NEITHER)
    word = FIRST.search(spelled(answer_part(text)))
    return {"yes": YES, "no": NO}.get((word["word"] or "").lower(), NEITHER) if word else NEITHER


def with_article(name: str) -> str:
    """Add the article a or an to a noun, depending on its first letter."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
