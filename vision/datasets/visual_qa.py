"""Questions about pictures and clips with answers that can be checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmrl.registry import data
from mmrl.rows import DataRow, RowError, sound_rows
from mmrl.types import Media, Message, Outcome, Prompt
from mmrl.vision.asking import distinct, interleaved
from mmrl.vision.media import MediaRoot, decode_image
from mmrl.vision.named_media import Named, media_of
from mmrl.vision.video import MediaError, Sampling

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
log = logging.getLogger("mmrl")


@data
def visual_qa(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    prompt: str = "{question}",
    demo: str = "",
    frames_per_second: float = 2.0,
    max_frames: int = 64,
    total_pixels: int = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: int = 0,
) -> list[Prompt]:
    """Read questions, media and answers, as jsonl, JSON, parquet or a folder of `datasets`.

    A row holds `question`, `answer` (or a list `answers`, each of which is right), and `image`, `images`,
    `video` or `videos`: paths under `root` (by default the folder of the rows), or encoded pictures. Marks
    <image> and <video> in the question say where they stand; without marks they come first. `columns` maps
    these names to those of the file. `prompt` may also name `choices`, which it gets as lettered lines, and
    any other column. With `demo`, such as "<answer>{answer}</answer>", the right answer is a demonstration.
    Rows that cannot be used are errors, or with `bad_rows: drop` named in the log and left out.
    """
    source = Path(path)
    media = MediaRoot(Path(root) if root else source if source.is_dir() else source.parent)
    sampling = Sampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)
    prompts, bad = [], []
    for number, row in enumerate(sound_rows(source)):
        renamed = dict(row.columns) | {
            ours: row.columns.get(theirs) for ours, theirs in (columns or {}).items()
        }
        try:
            prompts.append(_prompt(renamed, row, number, (media, sampling), prompt, demo))
        except (RowError, MediaError) as error:
            bad.append(f"{row.place}: {error}")
        if len(prompts) == limit:
            break
    if bad and bad_rows == "error":
        shown = "\n  ".join(bad[:10])
        raise RowError(
            f"{len(bad)} rows of '{source}' cannot be used; mend them, or set `bad_rows: drop`:\n  {shown}"
        )
    for line in bad:
        log.warning("dropped %s", line)
    return distinct(prompts, path)


def _prompt(
    columns: Mapping[str, Any],
    row: DataRow,
    number: int,
    shown: tuple[MediaRoot, Sampling],
    template: str,
    demo: str,
) -> Prompt:
    question, target = columns.get("question"), answers_of(columns)
    if type(question) is not str or not question.strip():
        raise RowError(f"wanted a text `question`, got {question!r}; name its column in `columns`")
    words = {**columns, "question": question}
    if columns.get("choices"):
        words["choices"] = "\n".join(f"{a}. {b}" for a, b in zip(LETTERS, columns["choices"], strict=False))
    try:
        text = template.format(**words)
    except (KeyError, IndexError) as error:
        raise RowError(f"the prompt {template!r} names {error}, which the row does not have") from error
    media = [_medium(named, row.place, *shown) for named in media_of(columns)]
    uid = str(columns["id"]) if columns.get("id") is not None else f"{row.split}#{number}"
    first = target if type(target) is str else target[0]
    answers = (Outcome(text=demo.format(**{**words, "answer": first})),) if demo else ()
    kept = {key: value for key, value in columns.items() if key not in ("image", "images", "video", "videos")}
    return Prompt(uid, (Message("user", interleaved(text, media)),), target, answers, kept)


def answers_of(columns: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Find the right answer of a row, or all that are right."""
    match columns.get("answer", columns.get("answers")):
        case [*several] if several and all(str(one).strip() for one in several):
            return tuple(map(str, several))
        case bool() as truth:
            return "yes" if truth else "no"
        case str() | int() | float() as one if str(one).strip():
            return str(one)
        case other:
            raise RowError(f"wanted an `answer`, or a list `answers`, got {other!r}")


def _medium(named: Named, place: str, root: MediaRoot, sampling: Sampling) -> Media:
    if named.data and named.kind == "image":
        name = named.path or f"the picture of {place}"
        return Media("image", name, lambda: decode_image(named.data, name))
    root.locate(named.path)
    return root.image(named.path) if named.kind == "image" else root.video(named.path, sampling)
