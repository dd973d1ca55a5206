"""Rewards of the format and content of a text.

An answer that cannot be parsed has a low reward, not a missing one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Annotated, Literal

from mmrl.config.ranges import AtMost, PositiveInt
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome, tagged
from mmrl.core.reward_table import name_id
from mmrl.core.types import Outcome, Prompt

WORDS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6",
    "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
ARTICLES = {"a", "an", "the"}
NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:e-?\d+)?(?P<percent>\s*%)?", re.IGNORECASE)
Comparison = Literal["text", "words", "number"]


def number_of(match: re.Match) -> float:
    """Return the value of a match of `NUMBER`; 5 % is 0.05."""
    number = match[0].removesuffix(match["percent"] or "")
    return float(number.replace(",", "")) / (100 if match["percent"] else 1)


def comparable(text: str, tag: str, form: Comparison = "text") -> str:
    """Write an answer so that equal ones are equal texts; empty where there is nothing to compare.

    It is what the last block of `tag` holds, or the whole text without one. `text` ignores case and space,
    `words` articles, punctuation and how numbers up to ten are written as well; `number` is the last number.
    """
    blocks = tagged(text, tag)
    answer = blocks[-1] if blocks else text
    if form == "number":
        numbers = [number_of(match) for match in NUMBER.finditer(answer)]
        return f"{numbers[-1] + 0.0:.12g}" if numbers and math.isfinite(numbers[-1]) else ""
    return " ".join(normal_words(answer) if form == "words" else answer.lower().split())


def normal_words(text: str) -> list[str]:
    """List the words of a text in lower case, without articles and punctuation, numbers in digits."""
    words = re.findall(r"[^\W_]+(?:[.'-][^\W_]+)*", text.lower().replace(",", ""))
    return [WORDS.get(word, word) for word in words if word not in ARTICLES]


@reward
@per_outcome
def tag_format(prompt: Prompt, outcome: Outcome, *, tags: str = "") -> float:
    """Return 1 if the answer is exactly the requested tag blocks in order, else 0.

    Blocks are listed as `think,answer` or `answer`. Without `tags`, the answer's own tag `format` lists
    them (a demonstration without reasoning), else the prompt's column `format`, else they are
    `think,answer`. Case and surrounding space do not matter; an empty block counts as a block (TON, arXiv
    2505.16854).
    """
    asked = tags or outcome.tags.get("format") or prompt.columns.get("format") or "think,answer"
    # No block may hold another tag of its own name, so `<think>a<think>b</think>` fails.
    blocks = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in asked.split(","))
    text = (outcome.text or "").strip()
    return float(re.fullmatch(blocks, text, re.DOTALL | re.IGNORECASE) is not None)


@reward
@per_outcome
def skip_ratio(prompt: Prompt, outcome: Outcome, *, tag: str = "think") -> float:
    """Return 1 if the answer has a thought of nothing but space, else 0: its mean is TON's share of skips.

    Every block of the tag must be empty; an answer without one has skipped nothing (arXiv 2505.16854). A
    label: give it the weight 0, because to skip is not rewarded by itself.
    """
    thoughts = tagged(outcome.text or "", tag)
    return float(bool(thoughts) and not any(map(str.strip, thoughts)))


@reward
@per_outcome
def think_format(prompt: Prompt, outcome: Outcome) -> float:
    """Return 1 if the answer begins with one closed think block (TRL's think_format_reward), else 0."""
    text = outcome.text or ""
    # The look-ahead: no second block is opened, inside the first or after it.
    return float(re.match(r"<think>(?!.*<think>).*?</think>", text, re.DOTALL) is not None)


@reward
@per_outcome
def think_closed(prompt: Prompt, outcome: Outcome) -> float:
    """Return 1 if a line that is `</think>` alone ends the thought exactly once, else 0 (open-rs).

    For models whose prompt opens the think block already (arXiv 2503.16219).
    """
    return float((outcome.text or "").count("\n</think>\n") == 1)


@reward
@per_outcome
def exact_match(prompt: Prompt, outcome: Outcome, *, tag: str = "answer") -> float:
    """Return 1 if the last `tag` block of the answer equals the target up to case and space, else 0.

    Without such a block the whole text is compared.
    """
    return float(comparable(outcome.text or "", tag) == " ".join(str(prompt.target).lower().split()))


def word_f1(text: str, other: str) -> float:
    """Compute the F1 of the words of two texts, without case, articles and punctuation."""
    words, wanted = normal_words(text), normal_words(other)
    shared = (Counter(words) & Counter(wanted)).total()
    return 2 * shared / (len(words) + len(wanted)) if words and wanted else float(words == wanted)


@reward
@per_outcome
def answer_f1(prompt: Prompt, outcome: Outcome, *, tag: str = "answer") -> float:
    """Return the F1 of the words of the last `tag` block and of the target, as GraphRAG-R1 measures it.

    arXiv 2507.23581. 0 without such a block; of several targets the best counts. As in its code True and
    False are yes and no, and where one side is yes, no or noanswer the other has to be the same.
    """
    blocks = tagged(outcome.text or "", tag)
    several = prompt.target if isinstance(prompt.target, list | tuple) else [prompt.target]
    return max((_f1(blocks[-1], str(target)) for target in several), default=0.0) if blocks else 0.0


def _f1(answer: str, target: str) -> float:
    sides = [" ".join(normal_words(text.replace("_", " "))) for text in (answer, target)]
    sides = [{"true": "yes", "false": "no"}.get(side, side) for side in sides]
    if {"yes", "no", "noanswer"}.intersection(sides) and sides[0] != sides[1]:
        return 0.0
    return word_f1(*sides)


@reward
@per_outcome
def answer_cluster(
    prompt: Prompt, outcome: Outcome, *, tag: str = "answer", form: Comparison = "text"
) -> float | None:
    """Number the answer: equal numbers for equal answers, to use as a label.

    It hashes the last `tag` block of the answer, or the whole text without one, to [0, 1); an answer without
    anything to compare has no number. `form` says what is equal, as for `majority`: by default up to case
    and space. Give it weight 0; pieces such as `semantic_entropy` and `consistency_mix` read which answers of
    a group agree.
    """
    words = comparable(outcome.text or "", tag, form)
    return (name_id(words) >> 10) / 2**53 if words else None  # 53 bits, which a float holds exactly


@reward
@per_outcome
def overlong(
    prompt: Prompt,
    outcome: Outcome,
    *,
    max_completion_length: PositiveInt,
    soft_punish_cache: Annotated[PositiveInt, AtMost("max_completion_length")],
) -> float:
    """Soft length penalty before the hard limit (DAPO, arXiv 2503.14476).

    It is 0, then falls linearly to -1 at `max_completion_length`, from `soft_punish_cache` steps before it,
    and is -1 beyond. Lengths are steps, as the engine counted them.
    """
    if outcome.end is None:
        raise ValueError(f"`overlong` counts steps, but the outcome of prompt '{prompt.uid}' has no `end`")
    start = max_completion_length - soft_punish_cache
    if outcome.end <= start:
        return 0.0
    return (start - outcome.end) / soft_punish_cache if outcome.end <= max_completion_length else -1.0


@reward
@per_outcome
def precomputed(prompt: Prompt, outcome: Outcome, *, key: str) -> float | None:
    """Read a reward that was recorded earlier, or by the engine; None where there is none."""
    return outcome.recorded.get(key)
