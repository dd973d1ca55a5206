"""Command `mmrl compare`: two evaluations answer by answer, and why they differ."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from mmrl.cli.command import argument, command, print_table, printable


@command(
    argument("first", type=Path, help="the output_dir of an evaluation or a run, or a parquet file"),
    argument("second", type=Path, help="another one, which is called better or worse than the first"),
    argument("--by", help="the reward that the page orders by (default: the first that is only 0 and 1)"),
    argument("--output", type=Path, default=Path("compared.html"), help="the page to write (compared.html)"),
    argument("--json", type=Path, help="also write all numbers, settings and prompts into this file"),
    examples=(
        "mmrl compare runs/base runs/tuned",
        "mmrl compare runs/ours runs/reported --json compared.json",
        "mmrl compare runs/a/predictions/step-000000.parquet runs/a --by short_answer",
    ),
)
def compare(given: argparse.Namespace) -> None:
    """Compare two evaluations answer by answer, and list the settings that differ with their effects.

    Answers are matched by the uids of their prompts. Stored answers are scored again with the other
    evaluation's rewards and metrics, and prompts are rendered again with its settings. No model is loaded,
    except by rewards that are models. If an effect needs a run, its command is printed.
    """
    from mmrl.inference.evaluations import explain, read_stored, rescore_both
    from mmrl.reporting.effects import finite
    from mmrl.reporting.html import write_compared_page
    from mmrl.reporting.html.predictions import change_rows, notes_on
    from mmrl.reporting.predictions import change_of

    stored = [read_stored(given.first), read_stored(given.second)]
    names = [str(given.first), str(given.second)]
    joined, faults = rescore_both(*stored, by=given.by)
    changes = {title: [change_of(one, measure) for measure in one.measures] for title, one in joined.items()}
    explanation = explain(*stored)
    explanation = replace(explanation, notes=[*explanation.notes, *faults])
    for title, listed in changes.items():
        titles, rows = change_rows(listed, names)
        print_table(titles, *rows, title=printable(title) or None)
        print()
    if explanation.effects:
        titles, rows = explanation.rows(names)
        rows = [[printable(cell) for cell in row] for row in rows]
        print_table(titles, *rows, title="settings that differ")
        print()
    for cause, difference in explanation.differing_prompts():
        print(f"{cause}: {difference.text}; the first, {printable(difference.uid)}:")
        for name, (before, after) in zip(names, difference.excerpts(), strict=True):
            print(printable(f"  {name}: {before}>>>{after}"))
    for note in (*notes_on(next(iter(joined.values())), names), *explanation.notes):
        print(printable(note))
    if given.json:
        plain = {title or "as evaluated": [asdict(c) | {"p": c.p} for c in v] for title, v in changes.items()}
        written = finite({"evaluations": names, "changes": plain, **explanation.plain()})
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(written, indent=2), encoding="utf-8")
        print(f"json: {given.json}")
    print(f"page: {write_compared_page(joined, changes, names, given.output, explanation)}")
