"""Official scoring rules of question benchmarks: extract the answer from a text, and judge it.

Tests compare each rule with the benchmark's own code on the same texts. A rule returns (right, parsed):
whether the answer counts as right, and whether the rule found an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

from mmrl.core.edit_distance import levenshtein

Benchmark = Literal["mmmu", "mathvista", "mmbench", "ocrbench", "chartqa", "video_mme", "mvbench"]
Verdict = tuple[bool, bool]  # (whether the answer is right, whether the rule found an answer)


@dataclass(frozen=True)
class Question:
    """The data of a question that a scoring rule reads.

    Args:
        uid: Id of the question.
        answers: Right answers; any of them counts. For `mmmu`, `mmbench` and `video_mme` a letter.
        choices: The texts of the choices A, B, ...; empty for an open question.
        answer_type: MathVista's type of answer: integer, float, list or text.
        precision: MathVista's number of decimals of a float.
        dataset: Source of a row of OCRBench, such as HME100k.
    """

    uid: str
    answers: Sequence[str]
    choices: Sequence[str] = ()
    answer_type: str = ""
    precision: float | None = None
    dataset: str = ""

    @property
    def letters(self) -> str:
        """The letters of the choices."""
        return ascii_uppercase[: len(self.choices)]


# ---- MMMU (arXiv 2311.16502)

CLUES = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
# Equivalent to the published patterns on lower-case text, but linear on long strings of digits.
NUMBERS = [
    re.compile(pattern)
    for pattern in (
        r"-?\b\d{1,3}(?:,\d{3})+\b",
        r"-?(?<!\d)\d++(?:\.\d++)?e[+-]?\d+",
        r"-?(?:(?<!\d)\d++\.\d++|\.\d++|(?<!\d)\d++\b)(?!e[+-]?\d)(?![,\d])",
    )
]


def mmmu(text: str, question: Question) -> Verdict:
    """Apply MMMU's rules. If a text names no choice, a random letter, seeded by the question's id, is judged.

    In MMMU's own code, the random letter depends on the order of the answers. The answer to an open question
    is right if a number in it equals the target to two decimals, or a key phrase in it contains the target.
    """
    if question.choices:
        letter = mmmu_letter(text, question)
        drawn = letter or random.Random(question.uid).choice(question.letters)
        return drawn in question.answers, letter is not None
    wanted = [value for answer in question.answers for value in _normal(answer)]
    names = [value for value in wanted if isinstance(value, str)]
    found = mmmu_phrases(text)
    right = (any(n in v for n in names) if isinstance(v, str) else v in wanted for v in found)
    return any(right), bool(text.strip())


def mmmu_letter(text: str, question: Question) -> str | None:
    """Find a choice's letter: the last `(A)`, else the last ` A `, else in long texts the choice's text."""
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    for form in ("({})", " {} "):
        if letter := _last({letter: text.rfind(form.format(letter)) for letter in question.letters}):
            return letter
    named = zip(question.letters, question.choices, strict=True)
    places = {letter: text.lower().rfind(choice.lower()) for letter, choice in named}
    return _last(places) if len(text.split()) > 5 else None


def mmmu_phrases(text: str) -> list[str | float]:
    """List the key phrases of an open answer and the numbers in them, normalised."""
    text = text.strip().strip(".").lower()
    lines, phrases = text.split("\n"), []
    for i, line in enumerate(lines):
        shortest = ""
        for clue in (*CLUES, "=") if i == len(lines) - 1 else CLUES:
            tail = line.split(clue)[-1].strip() if clue in line else None
            if tail is not None and (not shortest or len(tail) < len(shortest)):
                shortest = tail
        if shortest and shortest not in ":,.!?;'":
            phrases.append(shortest)
    phrases = phrases or [text]
    numbers = [number for phrase in phrases for pattern in NUMBERS for number in pattern.findall(phrase)]
    return [value for part in (*phrases, *numbers) for value in _normal(part)]


def _last(places: Mapping[str, int]) -> str | None:
    """Return the letter with the last position in the text; None if all are -1 (not found)."""
    letter = max(places, key=lambda letter: places[letter])
    return letter if places[letter] >= 0 else None


def _normal(text: str) -> list[str | float]:
    """Round a number to two decimals; give a letter a space before or after, to find it only at word ends."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


# ---- MathVista (arXiv 2310.02255)


def mathvista(text: str, question: Question) -> Verdict:
    """Apply MathVista's rules without its LLM judge; an answer that no rule can extract counts as empty.

    As in its code, an empty answer to a multiple choice is compared with the most similar choice.
    """
    extracted = mathvista_answer(text, question)
    return mathvista_normal(extracted, question) in question.answers, bool(extracted)


def mathvista_answer(text: str, question: Question) -> str:
    """Extract an answer: the text if it is a choice or number, else the quotation of `The answer is "x"`."""
    if text in question.choices:
        return text
    kinds: dict[str, Callable[[str], object]] = {"integer": int, "float": float}
    if convert := kinds.get(question.answer_type):
        try:
            return str(convert(text))
        except ValueError:
            pass
    quoted = re.search(r'The answer is "(.*)"\.', text)
    return quoted[1] if quoted else ""


def mathvista_normal(answer: str, question: Question) -> str | None:
    """Convert an extracted answer to the type of the question; None if it is no number."""
    if question.choices:
        answer = answer.strip()
        bracketed = re.search(r"\(([a-zA-Z])\)", answer)
        answer = bracketed[1].upper() if bracketed else answer
        if len(answer) == 1 and answer in question.letters:
            return question.choices[question.letters.index(answer)]
        return min(question.choices, key=lambda choice: levenshtein(answer, choice))
    try:
        if question.answer_type == "integer":
            return str(int(float(answer)))
        if question.answer_type == "float" and question.precision is not None:
            return str(round(float(answer), int(question.precision)))
    except (ValueError, OverflowError):
        return None
    return answer


# ---- MMBench (arXiv 2307.06281), with the exact matching of VLMEvalKit

REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
STATED = re.compile(r"(?:correct\s+)?answer\s+is\s+\**([ABCD])\**", re.IGNORECASE)


def mmbench(text: str, question: Question) -> Verdict:
    """Apply VLMEvalKit's exact matching; answers that only its LLM judge could match count as wrong."""
    letter = mmbench_letter(text, question)
    return letter in question.answers, letter is not None


def mmbench_letter(text: str, question: Question) -> str | None:
    """Find the chosen letter: a letter alone, or the only choice whose text occurs; Z if it refuses."""
    if "Failed to obtain answer via API" not in text:
        if any(refusal in text for refusal in REFUSALS):
            return "Z"
        words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
        letters = [letter for letter in question.letters if letter in words]
        if len(letters) == 1 and words.index(letters[0]) > len(words) - 5:
            return letters[0]
        if not letters and "Z" in words:
            return "Z"
        stated = STATED.search(text)
        if stated and stated[1].upper() in question.letters:
            return stated[1].upper()
    lower = text.lower()
    if len(lower) > 2 * sum(map(len, question.choices)):
        return None
    named = zip(question.letters, question.choices, strict=True)
    letters = [letter for letter, choice in named if choice.lower() in lower]
    return letters[0] if len(letters) == 1 else None


# ---- OCRBench (arXiv 2305.07895), ChartQA (arXiv 2203.10244)


def ocrbench(text: str, question: Question) -> Verdict:
    """Apply OCRBench's rule: the answer contains a target, ignoring case (formulas: and white space)."""

    def plain(words: str) -> str:
        words = words.strip().replace("\n", " ")
        return words.replace(" ", "") if question.dataset == "HME100k" else words.lower().strip()

    return any(plain(answer) in plain(text) for answer in question.answers), bool(text.strip())


def chartqa(text: str, question: Question) -> Verdict:
    """Apply relaxed accuracy: a number within 5 % of the target, or an equal text, ignoring case."""

    def number(words: str) -> float | None:
        try:
            return float(words.rstrip("%")) / 100 if words.endswith("%") else float(words)
        except ValueError:
            return None

    answer = number(text)
    for target in question.answers:
        value = number(target)
        if answer is not None and value:
            if abs(answer - value) / abs(value) <= 0.05:
                return True, True
        elif text.lower() == target.lower():
            return True, True
    return False, bool(text.strip())


# ---- Video-MME (arXiv 2405.21075), MVBench (arXiv 2311.17005)

PREFIXES = (
    "The best answer is", "The correct answer is", "The answer is", "The answer", "Answer:", "Option:",
    "The correct answer", "The correct option",
)  # fmt: skip


def video_mme(text: str, question: Question) -> Verdict:
    """Apply Video-MME's rule: the first of the letters A to D in a text, after removing known phrases."""
    for prefix in PREFIXES:
        text = text.replace(prefix, "")
    letter = re.search("[ABCD]", text)
    return bool(letter) and letter[0] in question.answers, bool(letter)


def mvbench(text: str, question: Question) -> Verdict:
    """Apply MVBench's rule: the first word of the first line is the letter of the right choice.

    Our reading: a first word without a letter or digit is wrong; MVBench's code takes an empty one as right.
    """
    word = text.strip().split("\n")[0].lower().split(" ")[0]
    places = [i for i, choice in enumerate(question.choices) if choice in question.answers]
    option = f"({ascii_uppercase[places[-1]].lower()})" if places else ""
    parsed = any(map(str.isalnum, word))
    return parsed and bool(option) and (word.replace(".", "") in option or option in word), parsed


RULES: dict[Benchmark, Callable[[str, Question], Verdict]] = {
    "mmmu": mmmu,
    "mathvista": mathvista,
    "mmbench": mmbench,
    "ocrbench": ocrbench,
    "chartqa": chartqa,
    "video_mme": video_mme,
    "mvbench": mvbench,
}


def own_answer(benchmark: Benchmark, question: Question) -> tuple[str, ...]:
    """Format every right answer to a question so that the scoring rule of its benchmark accepts it."""
    named = zip(question.letters, question.choices, strict=True)
    letters = tuple(f"({letter})" for letter, choice in named if choice in question.answers)[-1:]
    if benchmark == "mathvista":
        return tuple(f'The answer is "{answer}".' for answer in letters or question.answers)
    return letters if benchmark == "mvbench" else tuple(question.answers)
