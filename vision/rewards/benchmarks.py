"""Reward and metric labels for the answers to question benchmarks, by their official rules."""

from __future__ import annotations

from typing import Literal

from mmrl.config.registry import reward
from mmrl.core.answer_text import answer_part
from mmrl.core.answers import targets_of
from mmrl.core.choices import choices_in
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer, per_outcome
from mmrl.vision.benchmarks.answer_rules import RULES, Benchmark, Question, own_answer


def _own(prompt: Prompt, *, form: Benchmark | None, of: str, tag: str) -> OwnAnswer | None:
    asked = _question(prompt)
    if not asked.answers:
        return None
    return OwnAnswer(
        own_answer(_rule(prompt, form), asked) if of == "correct" else ()
    )  # labels have no right answer


@reward(own_answer=_own)
@per_outcome
def benchmark_answer(
    prompt: Prompt,
    outcome: Outcome,
    *,
    form: Benchmark | None = None,
    of: Literal["correct", "parsed"] = "correct",
    tag: str = "",
) -> float | None:
    """Reward an answer with 1 if it is right by the official rule of its benchmark, else 0.

    The reward is None for a row without a published answer. The rules read the columns that the data set
    `vision.benchmark` gives to prompts: `choices`, `answer_type`, `precision`, `dataset`.

    Args:
        form: The rule. `mmmu`: the last letter, or key phrases and numbers; a letter at random if there is
            none. `mathvista`: a number, a choice, or `The answer is "..."`. `mmbench`: a letter, or the text
            of one choice. `ocrbench`: the target is part of the answer. `chartqa`: 5 % relative tolerance.
            `video_mme`: the first letter. `mvbench`: the first word. Null: that of the row's benchmark.
        of: What to return. `correct`: 1 for a right answer. `parsed`: 1 if the rule found an answer.
        tag: Read only the last block of this tag, or what follows the thought, as `vision.short_answer` does;
            empty: the whole text, as the official code does.
    """
    asked = _question(prompt)
    if not asked.answers:
        return None
    text = outcome.text or ""
    right, parsed = RULES[_rule(prompt, form)](answer_part(text, tag) if tag else text, asked)
    return float(right if of == "correct" else parsed)


def _rule(prompt: Prompt, form: Benchmark | None) -> Benchmark:
    if (form or prompt.columns.get("benchmark")) not in RULES:
        raise ValueError(
            f"the prompt '{prompt.uid}' is of no benchmark; set `form` of `vision.benchmark_answer` to "
            f"one of {', '.join(RULES)}"
        )
    return form or prompt.columns["benchmark"]


def _question(prompt: Prompt) -> Question:
    columns, given = prompt.columns, prompt.columns.get("choices")
    listed = given if isinstance(given, list | tuple) else choices_in(columns).values()
    choices = tuple(map(str, listed))
    kind, precision = str(columns.get("answer_type") or ""), columns.get("precision")
    dataset = str(columns.get("dataset") or "")
    return Question(prompt.uid, targets_of(prompt.target), choices, kind, precision, dataset)
