"""Every piece of the library is documented: a short first line, and its options in an `Args:` block."""

from __future__ import annotations

import inspect
import re

import pytest

from mmrl.config.binding import FILLED
from mmrl.config.registry import HOMES, Entry, pieces

FIRST_LINE = 100
FEW = 2  # options that the text may explain without a block

EVERY = [entry for kind in HOMES for entry in pieces(kind) if entry.target.__module__.startswith("mmrl.")]
EACH = pytest.mark.parametrize("entry", EVERY, ids=[f"{entry.kind}-{entry.full_name}" for entry in EVERY])


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
    assert 0 < len(first) <= FIRST_LINE, (
        f"{entry.target.__module__}: the first line of the docstring of {entry.kind} '{entry.full_name}' has "
        f"{len(first)} characters; write 1 to {FIRST_LINE}: {first}"
    )


@EACH
def test_every_option_of_a_piece_is_documented(entry):
    missing = undocumented(entry)
    assert not missing, (
        f"{entry.target.__module__}: the block `Args:` of {entry.kind} '{entry.full_name}' lacks "
        f"{', '.join(sorted(missing))}; write a line for each with meaning, unit and range"
    )


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
