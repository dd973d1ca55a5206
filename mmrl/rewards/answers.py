"""Comparison of answers with targets, for rewards and votes; inference of a data set's answer form."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from mmrl.config.registry import FORM_PACKAGE
from mmrl.core.answer_text import answer_part
from mmrl.core.answers import (
    besides_numbers,
    exact_text,
    number_in,
    only_number,
    same_words,
    targets_of,
    words_of,
)
from mmrl.core.choices import choice_in, choices_in, letter_in
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer
from mmrl.rewards.formulas import formula_key, same_formula

AnswerForm = Literal["exact", "text", "words", "number", "letter", "choice", "math"]
CURRENCIES = frozenset("$€£¥₹₩")  # an answer may omit the currency sign, but must not have another one
LISTED = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)  # a Python list of strings as text
MATH = {FORM_PACKAGE: "math"}  # argument of `reward` for rewards with an option `form`
log = logging.getLogger("mmrl")
_warned: set[str] = set()  # names of rewards that already warned of a missing target


def comparable(
    text: str, tag: str, form: AnswerForm = "text", choices: Mapping[str, str] | None = None
) -> str:
    r"""Normalize an answer, so that equal answers become equal texts; return "" for an empty answer.

    The answer is the last `tag` block, otherwise the last \boxed{}, otherwise the whole text. Forms:

    - `exact`: the text without regard to case and space.
    - `text` (or `words`): the words without articles and punctuation, numbers up to ten in digits. Signs,
      fractions, comparisons and percent are kept: our reading of VQA's normalisation.
    - `number`: the last number. `letter`: the letter of a multiple choice.
    - `choice`: one of `choices`, by its letter, its text or its index from 0.
    - `math`: a formula in the normal form of math-verify; other texts as words.
    """
    part = answer_part(text, tag)
    match form:
        case "exact":
            return exact_text(part)
        case "number":
            number = number_in(part)
            return "" if number is None else str(number)
        case "letter":
            return letter_in(part)
        case "choice":
            return choice_in(part, choices or {}) or letter_in(part)
        case "math":
            number = number_in(part) if only_number(part) else None
            return str(number) if number is not None else formula_key(part) or " ".join(words_of(part))
    return " ".join(words_of(part))


def is_right(
    text: str,
    target: str,
    form: AnswerForm = "text",
    *,
    tag: str = "answer",
    tolerance: float = 0.0,
    choices: Mapping[str, str] | None = None,
) -> bool | None:
    """Whether an answer equals a target; None for an empty target.

    If the target does not have the form, such as "cow" with `number`, the words are compared, or for a target
    without words the characters. So every target equals itself.
    """
    answer, wanted = answer_part(text, tag), answer_part(target, tag)
    if form in ("exact", "text", "words") and len(answer) > 100 * (len(wanted) + 10):
        return False  # much longer than the target
    if form == "choice" and choices and (label := choice_in(wanted, choices)):
        return choice_in(answer, choices) == label
    if form in ("letter", "choice") and (letter := letter_in(wanted)):
        return letter_in(answer) == letter
    if form == "number" and only_number(wanted):
        return _same_number(answer, wanted, tolerance)
    if form == "exact":
        return exact_text(answer) == exact_text(wanted) if exact_text(wanted) else None
    if form == "math":
        return same_formula(answer, wanted) if exact_text(wanted) else None
    if words := words_of(wanted):
        return same_words(words_of(answer), words)
    return exact_text(answer) == exact_text(wanted) if exact_text(wanted) else None


def _same_number(answer: str, wanted: str, tolerance: float) -> bool:
    """Whether the last numbers of answer and target are equal; the answer may omit the unit."""
    number, value = number_in(answer), number_in(wanted)
    if number is None and words_of(answer) == ["none"]:
        number, answer = Fraction(0), ""
    if number is None or value is None or abs(number - value) > Fraction(str(tolerance)) * abs(value):
        return False
    money = [CURRENCIES.intersection(text) for text in (answer, wanted)]
    if all(money) and money[0] != money[1]:
        return False
    units, answer_units = besides_numbers(wanted), besides_numbers(answer)
    return not answer_units or units <= answer_units


def graded(
    name: str,
    prompt: Prompt,
    outcome: Outcome,
    form: AnswerForm,
    *,
    tag: str = "answer",
    tolerance: float = 0.0,
) -> float | None:
    """Return 1 if an answer equals one of the prompt's targets, else 0; None if the prompt has no target."""
    choices = choices_in(prompt.columns) if form == "choice" else None
    verdicts = [
        is_right(outcome.text or "", target, form, tag=tag, tolerance=tolerance, choices=choices)
        for target in needed_targets(name, prompt)
    ]
    comparable_ones = [right for right in verdicts if right is not None]
    return float(any(comparable_ones)) if comparable_ones else None


def needed_targets(name: str, prompt: Prompt) -> list[str]:
    """List the targets of a prompt as texts; warn once per reward (`name`) if a prompt has none."""
    targets = targets_of(prompt.target)
    if not targets and name not in _warned:
        _warned.add(name)
        log.warning(
            "'%s' compares with a right answer, and prompt '%s' has none as a text or number (%.60r); it "
            "gives no reward for such prompts",
            name,
            prompt.uid,
            prompt.target,
        )
    return targets


# ---- the target as an answer

PAIRED_TAG = re.compile(r"<([A-Za-z][\w-]*)>(?=.*?</\1>)", re.DOTALL)


def own_text(prompt: Prompt, *, tag: str = "answer", form: AnswerForm | None = None) -> OwnAnswer | None:
    """Write each target as a right answer: plain, and in the tags or the box that the prompt mentions."""
    choices, unfit = choices_in(prompt.columns), ""
    question = prompt.text[-5000:]
    tags = {name.lower() for name in PAIRED_TAG.findall(question)} & {tag.lower(), "answer", "solution"}
    texts = []
    for target in targets_of(prompt.target):
        inside = answer_part(target, tag)
        label = letter_in(inside) or (form == "choice" and choice_in(inside, choices))
        fits = {"number": only_number(inside), "letter": label, "choice": label}.get(form or "", True)
        unfit = unfit or ("" if fits else f"{target[:40]!r} is no {form}")
        texts += [target, *(f"<{name}>{inside}</{name}>" for name in sorted(tags))]
        texts += [rf"\boxed{{{inside}}}"] if r"\boxed" in question else []
    return OwnAnswer(tuple(texts), unfit=unfit) if texts else None


def own_block(prompt: Prompt, *, tag: str = "answer") -> OwnAnswer | None:
    """Write each target as a right answer: a `tag` block after an empty think block."""
    parts = [answer_part(target, tag) for target in targets_of(prompt.target)]
    return OwnAnswer(tuple(f"<think></think><{tag}>{part}</{tag}>" for part in parts)) if parts else None


# ---- the form of a data set


class FormOfData:
    """Answer form of the targets of a data set, inferred on the first call.

    `sentence` explains the form to the user; it is empty before the first call.
    """

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.prompts, self.sentence = prompts, ""
        self.form: AnswerForm | None = None

    def __call__(self) -> AnswerForm | None:
        if not self.sentence:
            self.form, self.sentence = infer_form(self.prompts)
        return self.form


def infer_form(prompts: Iterable[Prompt]) -> tuple[AnswerForm | None, str]:
    """Infer the common answer form of all targets of a data set; also return a sentence about it.

    The form is None if no target is a text, a number or a list of them. Formulas count as text, because the
    form `math` needs a package.
    """
    count = letters = numbers = chosen = formulas = lists = 0
    example = listed = ""
    for prompt in prompts:
        targets = targets_of(prompt.target)
        if not targets:
            continue
        parts = [answer_part(target) for target in targets]
        count += 1
        choices = choices_in(prompt.columns)
        chosen += bool(choices) and all(choice_in(part, choices) for part in parts)
        letters += all(len(part.strip(" ().")) == 1 and part.strip(" ().").isupper() for part in parts)
        numbers += all(only_number(part) and not besides_numbers(part) for part in parts)
        if any(mark in part for part in parts for mark in ("\\", "^", "=")):
            formulas, example = formulas + 1, example or parts[0].strip()
        if any(LISTED.fullmatch(part) for part in parts):
            lists, listed = lists + 1, listed or parts[0].strip()
    if not count:
        return None, "no target is a text or a number, so no form of answers is known"
    forms: Sequence[tuple[AnswerForm, int, str]] = (
        ("choice", chosen, "one of the row's choices"),
        ("letter", letters, "a single letter"),
        ("number", numbers, "a number"),
    )
    for form, matches, what in forms:
        if matches == count:
            rows = "the only target is" if count == 1 else f"each of the {count:,} targets is"
            return form, f"{rows} {what}; rewards without `form` read answers with `form: {form}`"
    targets = f"{count:,} target{'s'[: count > 1]}"
    sentence = f"rewards without `form` compare answers as words (`form: text`) with {targets}"
    mixed = [f"{matches:,} are each {what}" for _, matches, what in forms if matches]
    sentence += f", of which {', '.join(mixed)}" if mixed else ""
    if formulas:
        sentence += f"; {formulas:,} are formulas such as {example[:40]!r}: `form: math` takes equal ones too"
    if lists:
        sentence += f"; {lists:,} are lists inside a text such as {listed[:40]!r}, compared as one text: "
        sentence += "write several right answers as a list of JSON, in the column `answers`"
    return "text", sentence
