"""Rewards of short answers that can be checked without a judge."""

from __future__ import annotations

import math
import re
from typing import Literal

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome, tagged
from mmrl.core.types import Outcome, Prompt

NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:e-?\d+)?(?P<percent>\s*%)?", re.IGNORECASE)
WORDS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6",
    "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
ARTICLES = {"a", "an", "the"}


@reward
@per_outcome
def short_answer(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: Literal["text", "number", "letter"] = "text",
    tolerance: NonNegativeFloat = 0.0,
    tag: str = "answer",
) -> float:
    """Give 1 if the last block `tag` (or boxed answer, or the whole text) is a right answer, else 0.

    `text` compares words, whatever their case, signs, articles, and numbers up to ten in letters: our reading
    of VQA's normalisation. `number` compares the last number with the right one, up to a share `tolerance` of
    it (0.05 is the relaxed accuracy of ChartQA, arXiv 2203.10244). `letter` compares the letter of a choice.
    """
    given = last_answer(outcome.text or "", tag)
    right = prompt.target if type(prompt.target) in (tuple, list) else (prompt.target,)
    check = {"text": _same_words, "number": _near, "letter": _same_letter}[form]
    return float(any(check(given, str(one), tolerance) for one in right))


def last_answer(text: str, tag: str) -> str:
    r"""Cut out the last block of a tag, else the last \boxed{} answer, else take the whole text."""
    blocks = tagged(text, tag) or re.findall(r"\\boxed\{([^{}]*)\}", text)
    return blocks[-1] if blocks else text


def normal_words(text: str) -> list[str]:
    """List the words of a text in lower case, without articles and signs, numbers in digits."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", text.lower().replace(",", ""))
    return [WORDS.get(word, word) for word in words if word not in ARTICLES]


def _same_words(given: str, right: str, tolerance: float) -> bool:
    return normal_words(given) == normal_words(right) != []


def _near(given: str, right: str, tolerance: float) -> bool:
    numbers = [_value(found) for found in NUMBER.finditer(given)]
    wanted = NUMBER.search(right)
    if not numbers or wanted is None:
        return _same_words(given, right, tolerance)
    target = _value(wanted)
    return math.isfinite(numbers[-1]) and abs(numbers[-1] - target) <= tolerance * abs(target) + 1e-9


def _value(found: re.Match) -> float:
    number = found[0].removesuffix(found["percent"] or "")
    return float(number.replace(",", "")) / (100 if found["percent"] else 1)


def _same_letter(given: str, right: str, tolerance: float) -> bool:
    found = re.findall(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])", given.strip())
    return bool(found) and found[-1] == right.strip()[:1].upper()
