"""Answers to questions of yes or no, as the scripts of the benchmarks read them."""

from __future__ import annotations

import re
from typing import Literal

from mmrl.config.reward_adapters import tagged

YES, NO, NEITHER = 1.0, 0.0, -1.0
Form = Literal["pope", "exact", "first_word"]


def parse_yes_no(text: str, form: Form = "pope") -> float:
    """Read an answer: 1 for yes, 0 for no, -1 for neither.

    `pope` reads as the script of POPE does (arXiv 2305.10355): the text up to the first full stop says no if
    one of its words is No, no or not, else yes. So "Yes, there is no doubt." says no, and an empty answer
    says yes. `exact` knows the answers Yes and No, written so, as AMBER's script does (arXiv 2311.07397).
    `first_word` reads the first yes or no of any case, in the last answer block if there is one.
    """
    if form == "pope":
        words = text.partition(".")[0].replace(",", "").split(" ")
        return NO if {"No", "no", "not"} & {*words} else YES
    if form == "exact":
        return {"Yes": YES, "No": NO}.get(text, NEITHER)
    blocks = tagged(text, "answer")
    found = re.search(r"\b(yes|no)\b", (blocks[-1] if blocks else text).lower())
    return NEITHER if found is None else YES if found[1] == "yes" else NO
