"""Rewards and metric labels of object hallucination, and of yes/no questions about images."""

from __future__ import annotations

from typing import Literal

from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.amber import DIMENSIONS
from mmrl.vision.benchmarks.chair import ratio
from mmrl.vision.benchmarks.pope import NO, YES, Form, parse_yes_no

LABELS = {"yes": YES, "no": NO}


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
    match prompt.target:
        case None | str():
            return None
    return prompt.target.counts(outcome.text or "")[count]


@reward
@per_outcome
def object_f1(
    prompt: Prompt, outcome: Outcome, *, form: Literal["f1", "precision", "recall"] = "f1"
) -> float | None:
    """Measure the objects that a description names: precision of its mentions, recall of classes, or F1.

    A description without mentions earns 0; None where the prompt asks for no description.
    """
    match prompt.target:
        case None | str():
            return None
    counts = prompt.target.counts(outcome.text or "")
    precision = ratio(counts["mentions"] - counts["hallucinated"], counts["mentions"])
    recall = ratio(counts["correct"], counts["truth"])
    f1 = ratio(2 * precision * recall, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1}[form]


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
