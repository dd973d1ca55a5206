"""Counts of what answers mention, as labels for metrics; and rewards made of them."""

from __future__ import annotations

from typing import Literal

from mmrl.config.registry import reward
from mmrl.config.reward_adapters import per_outcome
from mmrl.core.types import Outcome, Prompt
from mmrl.vision.benchmarks.amber import DIMENSIONS
from mmrl.vision.benchmarks.chair import ratio
from mmrl.vision.benchmarks.yes_no_answers import NO, YES, Form, parse_yes_no

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
    """Count what a description mentions, or what its picture holds (CHAIR, Object HalBench, AMBER): a label
    for `ratio_of_sums`; give it weight 0.

    `mentions` and `hallucinated` count repeats, `correct` and `truth` classes; `mentioning`, `hallucinating`
    and `clean` (no hallucination) are 0 or 1; `matched` are the tempting absent classes that are mentioned,
    of `tempting`. None where the prompt asks for no description.
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
    """Measure the objects that one description names: precision over its mentions, recall over the classes
    there are, or F1. A description that names nothing earns 0."""
    match prompt.target:
        case None | str():
            return None
    counts = prompt.target.counts(outcome.text or "")
    precision = ratio(counts["mentions"] - counts["hallucinated"], counts["mentions"])
    recall = ratio(counts["correct"], counts["truth"])
    return {
        "precision": precision,
        "recall": recall,
        "f1": ratio(2 * precision * recall, precision + recall),
    }[form]


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
    """Give 1 for a right answer to a question of yes or no, else 0; or as labels for `confusion` the `answer`
    and the `truth`: 1 for yes, 0 for no, -1 for neither.

    `form` says how answers are read: `pope` and `exact` as the scripts of POPE and AMBER do. `dimension`
    keeps the questions of one dimension of AMBER. None where the prompt asks anything else.
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
