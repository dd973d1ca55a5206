"""Every piece of the library is documented: a short first line, and its options in an `Args:` block."""

from __future__ import annotations

import inspect
import re

from mmrl.config.binding import FILLED
from mmrl.config.registry import HOMES, Entry, pieces
from tests.support.rules import piece_name, rule

FIRST_LINE = 100
FEW = 2  # options that the text may explain without a block

EVERY = [entry for kind in HOMES for entry in pieces(kind) if entry.target.__module__.startswith("mmrl.")]
EACH = rule(EVERY, piece_name)


def args_of(docstring: str) -> set[str]:
    """Read the names in a Google-style `Args:` block."""
    block = re.search(r"^Args:\n((?: +.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return set(re.findall(r"^    (\w+):", block[1], re.MULTILINE)) if block else set()


def undocumented(entry: Entry) -> set[str]:
    """Name the options that an `Args:` block has to explain and does not."""
    options = set(entry.options) - set(FILLED)
    return options - args_of(inspect.getdoc(entry.target) or "") if len(options) > FEW else set()


@EACH
def test_the_first_line_of_a_piece_is_short(entry):
    first = (inspect.getdoc(entry.target) or "").partition("\n")[0]
    if not 0 < len(first) <= FIRST_LINE:
        yield f"write a first line of 1 to {FIRST_LINE} characters, not {len(first)}: {first}"


@EACH
def test_every_option_of_a_piece_is_documented(entry):
    missing = undocumented(entry)
    if missing:
        yield f"document {', '.join(sorted(missing))} in `Args:`"


def test_an_args_block_is_read_up_to_its_end():
    text = "Do it.\n\nArgs:\n    a: One, with\n        more: text.\n    b: Two.\n\nReturns:\n    c: Three."
    assert args_of(text) == {"a", "b"}
    assert args_of("Do it.\n\n    a: No block.") == set()


def test_an_option_that_the_block_leaves_out_is_found():
    def piece(table, *, a: int = 1, b: int = 2, c: int = 3, generator=None):
        """Do it.

        Args:
            a: One.
            b: Two.
        """

    assert undocumented(Entry("advantage", "", "piece", piece)) == {"c"}
