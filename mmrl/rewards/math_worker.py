"""Child process that runs math-verify for `formulas`; it imports nothing from mmrl."""

from __future__ import annotations

import json
import sys
from typing import IO


def _serve(questions: IO[str], answers: IO[str]) -> None:
    import resource

    import math_verify
    import sympy

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # nested powers would use up all memory

    def parsed(text: str) -> list:
        marked = text if "$" in text or "\\boxed" in text else f"${text}$"
        return math_verify.parse(marked, parsing_timeout=None)

    for line in questions:
        kind, one, other = json.loads(line)
        try:
            first = parsed(one)
            if kind == "same":
                result = math_verify.verify(first, parsed(other), timeout_seconds=None)
            else:
                value = next(each for each in first if not isinstance(each, str))
                result = str(sympy.N(value, 15) if value.is_number else sympy.simplify(value))
        except (Exception, RecursionError):  # sympy fails in many ways on texts that are no formula
            result = None
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
