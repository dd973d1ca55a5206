"""Rewards and metric labels for answers about images: objects in descriptions, yes/no, short answers."""

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
    """Count the objects in a description or in its image (CHAIR, Object HalBench, AMBER).

    The count is a label (a value for the metric `ratio_of_sums`, not a reward): set `weight: 0`. None: the
    prompt asks for no description. `mentions`: object mentions, with repeats. `hallucinated`: mentions of
    absent objects, with repeats. `truth`: classes in the image. `correct`: the mentioned ones of these.
    `mentioning`, `hallucinating`, `clean`: 1 if any object, any absent object, no absent object is mentioned.
    `tempting`: absent classes that models tend to invent. `matched`: such classes that are mentioned.
    """
    counts = _counts(prompt, outcome)
    return None if counts is None else counts[count]


@reward
@per_outcome
def object_f1(
    prompt: Prompt, outcome: Outcome, *, form: Literal["f1", "precision", "recall"] = "f1"
) -> float | None:
    """Compute the precision, the recall or the F1 of the objects that a description mentions.

    Precision counts mentions, recall counts object classes. A description without mentions gets 0. The reward
    is None if the prompt does not ask for a description.
    """
    counts = _counts(prompt, outcome)
    if counts is None:
        return None
    precision = ratio(counts["mentions"] - counts["hallucinated"], counts["mentions"])
    recall = ratio(counts["correct"], counts["truth"])
    f1 = ratio(2 * precision * recall, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1}[form]


def _counts(prompt: Prompt, outcome: Outcome) -> dict[str, float] | None:
    """Count the objects in a description; None if the prompt does not ask for a description."""
    scene = prompt.target
    return None if scene is None or isinstance(scene, str) else scene.counts(outcome.text or "")


def _truth(prompt: Prompt) -> float | None:
    """Return 1 if the target of a yes/no question is yes, 0 if no, None for other targets."""
    targets = targets_of(prompt.target)
    return LABELS.get(tuple(words_of(answer_part(targets[0])))) if targets else None


def _own_yes_no(prompt: Prompt, *, of: str) -> OwnAnswer | None:
    truth = _truth(prompt)
    if truth is None:
        return None
    return OwnAnswer(("Yes" if truth == YES else "No",) if of == "correct" else ())  # else a label


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
        of: What to return. `correct`: 1 if the answer is right, else 0. `answer` or `truth`: the label of the
            answer or the target (1 for yes, 0 for no, -1 for neither) for the metric `binary_classification`.
        form: Parser of answers. `pope`: POPE's script. `exact`: AMBER's. `first_word`: the first yes or no.
        dimension: Dimension of AMBER to reward; questions of other dimensions get None. Empty: all questions.
    """
    truth = _truth(prompt)
    if truth is None or dimension and prompt.columns.get("type") not in DIMENSIONS[dimension]:
        return None
    answer = parse_yes_no(outcome.text or "", form)
    return {"truth": truth, "answer": answer, "correct": float(answer == truth)}[of]


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

    Answers and targets use the same parser, so the target itself gets 1. With several targets, any of them is
    right. The reward is None if the prompt has no target.

    Args:
        form: How to compare. `text`: words, ignoring case, punctuation and articles, with number words up to
            ten as digits (our reading of VQA's normalisation). `number`: the last number. `letter`: a letter
            of a multiple choice. `choice`: one of the row's `choices`, by letter, text or index from 0.
            `math`: formulas, with math-verify. `exact`: the text, ignoring case and white space. Null: the
            common form of all training targets, or `text` if there is none; `mmrl check --data` shows it.
        tolerance: Relative error allowed by `number` (0.05 in ChartQA's relaxed accuracy, arXiv 2203.10244).
        tag: Name of the answer block's tag.
    """
    return graded("short_answer", prompt, outcome, form or "text", tag=tag, tolerance=tolerance)
