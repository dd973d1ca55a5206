"""Pages of predictions: the answers of one evaluation, or of two side by side, with filters."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mmrl.reporting.effects import Explanation
from mmrl.reporting.html.layout import document, macros, table, templates
from mmrl.reporting.predictions import Change, Joined, Predictions, Row, read_predictions
from mmrl.reporting.thumbnails import illustrated


def write_predictions_page(source: Path, output: Path | None = None) -> Path:
    """Write the HTML page of a predictions file, by default next to the file and with the same name."""
    output = output or source.with_suffix(".html")
    output.write_text(predictions_page(read_predictions(source)), encoding="utf-8")
    return output


def write_compared_page(
    joined: Mapping[str, Joined],
    changes: Mapping[str, Sequence[Change]],
    names: Sequence[str],
    output: Path,
    explanation: Explanation,
) -> Path:
    """Write the HTML page that compares two evaluations; create its folder if necessary."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(compared_page(joined, changes, names, explanation), encoding="utf-8")
    return output


def predictions_page(predictions: Predictions) -> str:
    """Render the page with all answers of an evaluation, wrong answers first."""
    rows, judge = predictions.rows, predictions.judge
    note = f"{len(rows):,} answers to {len({row['uid'] for row in rows}):,} prompts"
    if judge:
        judged = [row["correct"] for row in rows if row.get("correct") is not None]
        note += f" · {sum(judged):,} of {len(judged):,} are correct: {judge} is 1"
    shows = ["wrong", "correct"] if judge else []
    content = rows_section([[[row]] for row in rows], predictions.measures, shows, [])
    title = predictions.path.resolve().parent.name
    return document(
        f"{title}: predictions",
        [content],
        heading="Predictions",
        subtitle=macros().note(f"{predictions.path.name} · {note}"),
        script="predictions.js",
    )


def compared_page(
    joined: Mapping[str, Joined],
    changes: Mapping[str, Sequence[Change]],
    names: Sequence[str],
    explanation: Explanation,
) -> str:
    """Render the page that shows the answers of two evaluations side by side, and why they differ.

    Args:
        joined: The two evaluations joined by prompt, once per set of rewards ("": their own; "both with the
            rewards of runs/b"). The page shows the answers of the first entry.
        changes: Changes of the measures of every joined pair.
        names: Names of the two evaluations.
        explanation: Effects of the settings that differ.
    """
    shown = next(iter(joined.values()))
    rows = [list(pair) for pair in shown.pairs]
    content = rows_section(rows, shown.measures, ["better", "worse", "unchanged"], names)
    tables = [
        (macros().note(title) if title else Markup()) + table(*change_rows(listed, names))
        for title, listed in changes.items()
    ]
    note = macros().note("; ".join([*notes_on(shown, names), *explanation.notes]))
    settings = macros().effects(*explanation.rows(names), explanation.differing_prompts(), names)
    title = " and ".join(names)
    heading = f"{names[0]} and {names[1]}, answer by answer"
    fragments = [*tables, settings, content]
    return document(title, fragments, heading=heading, subtitle=note, script="predictions.js")


def change_rows(changes: Sequence[Change], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and the rows of the table of changes between two evaluations."""
    counts = ["better", "worse", "unchanged", "p (sign test)"]
    titles = ["mean over prompts", *names, *counts, "difference (95 %)"]
    rows = [
        [
            change.name.removeprefix("reward/"),
            *(f"{value:.4g}" for value in (change.before, change.after)),
            *(str(count) for count in (change.better, change.worse, change.unchanged)),
            f"{change.p:.3g}",
            f"{change.after - change.before:+.4g} ({change.low:+.4g} to {change.high:+.4g})",
        ]
        for change in changes
    ]
    return titles, rows


def notes_on(joined: Joined, names: Sequence[str]) -> list[str]:
    """Return sentences with the numbers of prompts in both evaluations, in only one, and left out."""
    notes = [joined.note] if joined.note else []
    notes += [f"{len(joined.pairs)} prompts are in both"]
    for name, count in zip(names, (joined.only_first, joined.only_second), strict=True):
        notes += [f"{count} only in {name}"] if count else []
    if joined.other_targets:
        notes.append(f"{joined.other_targets} have other targets and are left out")
    if joined.other_words:
        notes.append(f"{joined.other_words} are worded differently")
    return notes


def rows_section(
    rows: Sequence[Sequence[Sequence[Row]]],
    measures: Sequence[str],
    shows: Sequence[str],
    names: Sequence[str],
) -> Markup:
    """Render the filters, and the rows as JSON for the script `predictions.js`.

    Args:
        rows: Rows of the page, each with one or two sides. A side has one evaluation's answers to a prompt.
        measures: Columns by which rows can be sorted on the page.
        shows: Choices of the filter that hides rows, such as "only prompts that changed".
        names: Names of the two sides; empty if there is one.
    """
    images: dict[bytes, int] = {}
    sounds: dict[bytes, int] = {}

    def number(image: bytes | None) -> int | None:
        return None if image is None else images.setdefault(image, len(images))

    def finite(value: Any) -> float | None:
        return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None

    def turns(row: Row) -> list[str | int | None]:
        """Split a conversation with tools into texts and indices of images."""
        if row.get("conversation") is None:
            return []
        parts = illustrated(str(row["conversation"]), row.get("shown") or ())
        return [part if isinstance(part, str) else number(part) for part in parts]

    def answer(row: Row) -> dict[str, Any]:
        values = [finite(row.get(measure)) for measure in measures]
        return {
            "text": row.get("completion"),
            "made": number(row.get("made")),
            "turns": turns(row),
            "values": values,
            "correct": row.get("correct"),
        }

    listed = []
    for sides in rows:
        first = sides[0][0]
        shown = next((row["seen"] for side in sides for row in side if row.get("seen")), None)
        about = {name: first.get(name) for name in ("uid", "split", "prompt", "target", "media")}
        answers = [[answer(row) for row in side] for side in sides]
        sound = next((row["heard"] for side in sides for row in side if row.get("heard")), None)
        heard_at = None if sound is None else sounds.setdefault(sound, len(sounds))
        listed.append({**about, "seen": number(shown), "heard": heard_at, "sides": answers})
    labels = [measure.removeprefix("reward/") for measure in measures]
    encoded = [base64.b64encode(image).decode() for image in images]
    heard = [base64.b64encode(sound).decode() for sound in sounds]
    data = {"rows": listed, "measures": labels, "names": list(names), "images": encoded, "sounds": heard}
    page = templates().get_template("predictions.j2")
    splits = sorted({split for row in listed if (split := row["split"])})
    return Markup(page.render(data=data, shows=shows, splits=splits))
