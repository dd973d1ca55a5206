"""Rewards and metric labels of answers about images: objects in descriptions, yes/no, short answers."""

from __future__ import annotations

import math
import re
from typing import Literal

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome, tagged
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.text import NUMBER, normal_words, number_of
from mmrl.vision.benchmarks.amber import DIMENSIONS
from mmrl.vision.benchmarks.chair import ratio
from mmrl.vision.benchmarks.pope import NO, YES, Form, parse_yes_no

LABELS = {"yes": YES, "no": NO}
AnswerForm = Literal["text", "number", "letter"]


@reward
@per_outcome
def object_mentions(
    prompt: Prompt,
    outcome: Outcome,
    *,
    count: Literal[
        "mentions", "hallucinated", "correct", "truth", "mentioning", "hallucinating", "clean", "matched",
        "tempting",
    ] = "hallucinated",
) -> float | None:  # fmt: skip
    """Count objects of a description or of its image (CHAIR, Object HalBench, AMBER).

    A label for the metric `ratio_of_sums`; give it weight 0. None where the prompt asks for no description.
    `mentions` and `hallucinated` count repeats, `correct` and `truth` classes; `mentioning`, `hallucinating`
    and `clean` (no hallucination) are 0 or 1; `matched` counts the mentioned ones of the `tempting` absent
    classes.
    """
    counts = _counts(prompt, outcome)
    return None if counts is None else counts[count]


@reward
@per_outcome
def object_f1(
    prompt: Prompt, outcome: Outcome, *, form: Literal["f1", "precision", "recall"] = "f1"
) -> float | None:
    """Measure the objects that a description names: precision of its mentions, recall of classes, or F1.

    A description without mentions earns 0; None where the prompt asks for no description.
    """
    counts = _counts(prompt, outcome)
    if counts is None:
        return None
    precision = ratio(counts["mentions"] - counts["hallucinated"], counts["mentions"])
    recall = ratio(counts["correct"], counts["truth"])
    f1 = ratio(2 * precision * recall, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1}[form]


def _counts(prompt: Prompt, outcome: Outcome) -> dict[str, float] | None:
    """Count the objects that a description names; None where the prompt asks for no description."""
    match prompt.target:
        case None | str():
            return None
        case scene:
            return scene.counts(outcome.text or "")


@reward
@per_outcome
def binary_vqa(
    prompt: Prompt,
    outcome: Outcome,
    *,
    of: Literal["correct", "answer", "truth"] = "correct",
    form: Form = "first_word",
    dimension: Literal["", "existence", "state", "number", "action", "attribute", "relation"] = "",
) -> float | None:
    """Reward the right answer to a yes/no question with 1, else 0; None for other prompts.

    Args:
        of: `correct`, or as labels for the metric `binary_classification` the `answer` and the `truth`: 1
            for yes, 0 for no, -1 for neither.
        form: How answers are parsed: `pope` and `exact` as the scripts of POPE and AMBER do, `first_word` by
            the first yes or no.
        dimension: Keep only the questions of this dimension of AMBER.
    """
    match prompt.target:
        case "yes" | "no":
            truth = LABELS[prompt.target]
        case _:
            return None
    if dimension and prompt.columns.get("type") not in DIMENSIONS[dimension]:
        return None
    answer = parse_yes_no(outcome.text or "", form)
    return {"truth": truth, "answer": answer, "correct": float(answer == truth)}[of]


# ---- short answers that can be verified without a judge


@reward
@per_outcome
def short_answer(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: AnswerForm = "text",
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


def _matches(answer: str, target: str, form: AnswerForm, tolerance: float) -> bool:
    if form == "letter":
        # Letters that stand alone: not the I of I'm.
        letters = re.findall(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])", answer.strip())
        return letters[-1:] == [target.strip()[:1].upper()]
    numbers, wanted = list(NUMBER.finditer(answer)), NUMBER.search(target)
    if form == "text" or not numbers or wanted is None:
        return normal_words(answer) == normal_words(target) != []  # a target without words matches nothing
    value, number = number_of(wanted), number_of(numbers[-1])
    # 1e-9, because 0.7 % is 0.006999999999999999 as a float. An answer such as 1e999 is infinite.
    return math.isfinite(number) and abs(number - value) <= tolerance * abs(value) + 1e-9


def last_answer(text: str, tag: str) -> str:
    r"""Return the content of the last block of a tag, else of the last \boxed{}, else the whole text."""
    blocks = tagged(text, tag) or re.findall(r"\\boxed\{([^{}]*)\}", text)
    return blocks[-1] if blocks else text
