"""Reward of short answers that can be verified without a judge."""

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
Form = Literal["text", "number", "letter"]


@reward
@per_outcome
def short_answer(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: Form = "text",
    tolerance: NonNegativeFloat = 0.0,
    tag: str = "answer",
) -> float:
    """Reward with 1 if the last answer block (or boxed answer, or the whole text) is right, else 0.

    Args:
        form: `text` compares words, ignoring case, punctuation and articles, with numbers up to ten in
            digits: our reading of VQA's normalisation. `number` compares the last number, `letter` the last
            single capital letter, of a multiple choice.
        tolerance: Relative error allowed by `number` (0.05 in ChartQA's relaxed accuracy, arXiv 2203.10244).
        tag: Name of the answer block's tag.
    """
    answer = last_answer(outcome.text or "", tag)
    match prompt.target:
        case [*targets]:
            pass
        case target:
            targets = [target]
    return float(any(_matches(answer, str(target), form, tolerance) for target in targets))


def _matches(answer: str, target: str, form: Form, tolerance: float) -> bool:
    if form == "letter":
        letters = re.findall(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])", answer.strip())
        return letters[-1:] == [target.strip()[:1].upper()]
    numbers = [_value(match) for match in NUMBER.finditer(answer)]
    wanted = NUMBER.search(target)
    if form == "text" or not numbers or wanted is None:
        return normal_words(answer) == normal_words(target) != []
    value = _value(wanted)
    return math.isfinite(numbers[-1]) and abs(numbers[-1] - value) <= tolerance * abs(value) + 1e-9


def _value(match: re.Match) -> float:
    number = match[0].removesuffix(match["percent"] or "")
    return float(number.replace(",", "")) / (100 if match["percent"] else 1)


def last_answer(text: str, tag: str) -> str:
    r"""Return the content of the last block of a tag, else of the last \boxed{}, else the whole text."""
    blocks = tagged(text, tag) or re.findall(r"\\boxed\{([^{}]*)\}", text)
    return blocks[-1] if blocks else text


def normal_words(text: str) -> list[str]:
    """List the words of a text in lower case, without articles and punctuation, numbers in digits."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", text.lower().replace(",", ""))
    return [WORDS.get(word, word) for word in words if word not in ARTICLES]
