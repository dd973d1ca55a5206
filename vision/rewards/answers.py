"""Rewards and metric labels of answers about images: objects in descriptions, yes/no, short answers."""

from __future__ import annotations

from typing import Literal

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import reward
from mmrl.core.answer_text import answer_part
from mmrl.core.answers import targets_of, words_of
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer, per_outcome
from mmrl.rewards.answers import MATH, AnswerForm, graded, own_text
from mmrl.vision.benchmarks.amber import DIMENSIONS
from mmrl.vision.benchmarks.chair import ratio
from mmrl.vision.benchmarks.pope import NO, YES, Form, parse_yes_no

LABELS: dict[tuple[str, ...], float] = {("yes",): YES, ("true",): YES, ("no",): NO, ("false",): NO}


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
    """Measure the objects in a description: precision of mentions, recall of classes, or F1.

    A description without mentions gets 0; None where the prompt asks for no description.
    """
    counts = _counts(prompt, outcome)
    if counts is None:
        return None
    precision = ratio(counts["mentions"] - counts["hallucinated"], counts["mentions"])
    recall = ratio(counts["correct"], counts["truth"])
    f1 = ratio(2 * precision * recall, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1}[form]


def _counts(prompt: Prompt, outcome: Outcome) -> dict[str, float] | None:
    """Count the objects in a description; None where the prompt asks for no description."""
    scene = prompt.target
    return None if scene is None or isinstance(scene, str) else scene.counts(outcome.text or "")


def _truth(prompt: Prompt) -> float | None:
    """Read the target of a yes/no question, 1 for yes; None for another target."""
    targets = targets_of(prompt.target)
    return LABELS.get(tuple(words_of(answer_part(targets[0])))) if targets else None


def _own_yes_no(prompt: Prompt, *, of: str) -> OwnAnswer | None:
    truth = _truth(prompt)
    return None if truth is None or of != "correct" else OwnAnswer(("Yes" if truth == YES else "No",))


@reward(own_answer=_own_yes_no)
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
        form: Parser of answers: `pope` and `exact` as in the scripts of POPE and AMBER, `first_word` for the
            first yes or no.
        dimension: Keep only the questions of this dimension of AMBER.
    """
    truth = _truth(prompt)
    if truth is None or dimension and prompt.columns.get("type") not in DIMENSIONS[dimension]:
        return None
    answer = parse_yes_no(outcome.text or "", form)
    return {"truth": truth, "answer": answer, "correct": float(answer == truth)}[of]


# ---- short answers that can be verified without a judge


@reward(packages=MATH, own_answer=own_text)
@per_outcome
def short_answer(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: AnswerForm | None = None,
    tolerance: NonNegativeFloat = 0.0,
    tag: str = "answer",
) -> float | None:
    """Reward with 1 if the last answer block (or boxed answer, or the whole text) is right, else 0.

    Answers and targets have the same parser, so that the target itself earns 1. Each of several targets is
    right; None where the prompt has none.

    Args:
        form: `text` compares words, ignoring case, punctuation and articles, with numbers up to ten in
            digits: our reading of VQA's normalisation. `number` compares the last number, `letter` the letter
            of a multiple choice, `choice` one of the row's `choices` by letter, text or place from 0, `math`
            formulas by math-verify, `exact` the text up to case and space. Null: the form that all targets of
            the training data have, `text` where they differ; `mmrl check --data` states it.
        tolerance: Relative error allowed by `number` (0.05 in ChartQA's relaxed accuracy, arXiv 2203.10244).
        tag: Name of the answer block's tag.
    """
    return graded("short_answer", prompt, outcome, form or "text", tag=tag, tolerance=tolerance)
