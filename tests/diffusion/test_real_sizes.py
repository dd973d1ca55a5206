"""The table of cards in docs/howto/memory.md, and the sizes of published models behind it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmrl.diagnostics.memory_estimates import smallest_card
from tests.diffusion.real_sizes import OPTIONS, PUBLISHED, STORED, Estimates, cells

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "memory.md"


def rows():
    """Rows of the table in the page, by model."""
    head = f"| {' | '.join(('model', *OPTIONS, STORED))} |\n"
    lines = PAGE.read_text().partition(head)[2].split("\n\n")[0].splitlines()[1:]
    return {line.split(" | ")[0].strip("| "): line for line in lines}


def test_the_table_names_the_card_of_each_estimate():
    assert set(rows()) == set(PUBLISHED)
    for line in rows().values():
        cells = re.findall(r"(\d+) \((\d+|none)\)", line)
        assert len(cells) == len(OPTIONS) + 1
        for size, card in cells:
            cards = {smallest_card((int(size) + rounding) * 2**30) for rounding in (-0.5, 0.5)}
            assert (0 if card == "none" else int(card)) in cards, line


@pytest.mark.slow
def test_a_row_is_that_of_the_estimates():
    name = "FLUX.2-klein-base-4B"  # the others take a minute or more; the command writes all
    first, *_, last = OPTIONS  # the last has all options of those between them, but other bits
    written = dict(zip((*OPTIONS, STORED), rows()[name].strip("| ").split(" | ")[1:], strict=True))
    assert cells(name, [first, last]) == {column: written[column] for column in (first, last, STORED)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_have_the_published_number_of_weights(name, tmp_path):
    published = PUBLISHED[name]
    estimates = Estimates(published, tmp_path, measure=False)
    count = lambda blocks: sum(
        p.numel() for p in estimates.policy(blocks, {}, 1).pipe.transformer.parameters()
    )
    few = dict.fromkeys(published.blocks, 1)
    base = count(few)
    more = sum((n - 1) * (count(few | {kind: 2}) - base) for kind, n in published.blocks.items())
    assert (base + more) / 1e9 == pytest.approx(published.billions, rel=0.02)
