"""Comparison of formulas by math-verify, in a child process that is killed after a timeout.

The timeouts of math-verify use signals, which only work in the main thread. Rewards run in other threads.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import select
import subprocess
import sys
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmrl.core.answer_text import plain
from mmrl.core.answers import besides_numbers, number_in, only_number, same_words, words_of

SECONDS = 5.0  # time limit of one comparison
START = 60.0  # time limit of the first comparison, which imports sympy
LONGEST = 1000  # maximum number of characters of a formula
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log",
    "ln", "exp", "sqrt", "lim", "max", "min", "gcd", "lcm", "det", "mod", "infty", "inf", "pi", "frac",
}  # fmt: skip
LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
RUN = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
log = logging.getLogger("mmrl")


def same_formula(answer: str, target: str) -> bool:
    """Whether two formulas are equal according to math-verify; other texts are compared by words.

    Plain numbers are compared exactly, but a decimal of four places or more equals a fraction that rounds to
    it. A comparison that takes more than 5 seconds is logged and counts as not equal.
    """
    if "".join(plain(answer).split()) == "".join(plain(target).split()):
        return True
    if all(only_number(text) and "!" not in text for text in (answer, target)):
        words = [besides_numbers(text) for text in (answer, target)]
        if all(words) or not any(words):  # math-verify ignores units: 5 cm equals 5 m
            return words[0] == words[1] and _same_number(answer, target)
    if is_formula(answer) and is_formula(target):
        letters = [set(LETTERS.findall(text)) for text in (answer, target)]
        lower = [{letter.lower() for letter in each} for each in letters]
        if letters[0] != letters[1] and lower[0] == lower[1]:  # R is not r, but math-verify ignores case
            return False
        return bool(_ask("same", target.strip(), answer.strip()))
    return same_words(words_of(answer), words_of(target))


def formula_key(text: str) -> str:
    """Return the normal form of a formula, to compare votes; "" for a text that math-verify cannot parse."""
    return str(_ask("key", text.strip(), "") or "") if is_formula(text) else ""


def is_formula(text: str) -> bool:
    """Whether a text can be a formula: it has no words, which sympy would read as products of letters."""
    if not text.strip() or len(text) > LONGEST:
        return False
    runs = {run.lower() for run in RUN.findall(plain(text))} - FUNCTIONS
    bare = re.fullmatch(r"[A-Za-z\s]*", text) is not None
    return not any(len(run) > 2 or bare for run in runs)


def _same_number(answer: str, target: str) -> bool:
    number, wanted = number_in(answer), number_in(target)
    if number is None or wanted is None:
        return False
    if number == wanted:
        return True
    for value, other, text in ((number, wanted, answer), (wanted, number, target)):
        places = re.fullmatch(r"\s*-?\d*\.(\d{4,})\s*", text)
        # Accept a rounded decimal only for a fraction that has no finite decimal, because its denominator has
        # a prime factor besides 2 and 5: 0.33333 equals 1/3, but 0.12345 does not equal 0.123454.
        endless = 10 ** other.denominator.bit_length() % other.denominator
        if places and endless and round(other, len(places[1])) == value:
            return True
    return False


@lru_cache(maxsize=4096)
def _ask(kind: str, one: str, other: str) -> Any:
    if find_spec("math_verify") is None:
        raise ImportError("`form: math` compares formulas with math-verify: pip install 'mmrl[math]'")
    return PROCESS.ask([kind, one, other])


class MathProcess:
    """Child process that compares formulas; started for the first question, and again after it stopped."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: list[str]) -> Any:
        """Return the child process's answer to a question; None after a timeout."""
        with self.lock:
            first = self.process is None or self.process.poll() is not None
            if first:
                # -P: do not import from the folder of this file, whose http.py hides the standard module.
                command = [sys.executable, "-P", str(Path(__file__).resolve().with_name("math_worker.py"))]
                pipe = subprocess.PIPE
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            reader, writer = self.process.stdout, self.process.stdin
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                writer.flush()
                if select.select([reader], [], [], START if first else SECONDS)[0] and (
                    line := reader.readline()
                ):
                    return json.loads(line)
            except BrokenPipeError:
                pass
            self.stop()
        log.warning(
            "two formulas could not be compared in %g s, and count as not equal: %.200s", SECONDS, question
        )
        return None

    def stop(self) -> None:
        """Kill the child process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                pipe.close()
            self.process = None


PROCESS = MathProcess()
atexit.register(PROCESS.stop)
