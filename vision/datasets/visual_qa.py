"""Questions about pictures and clips with answers that can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Media, Message, Outcome, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, fill_template, listed, text, uid_of
from mmrl.vision.media.media_columns import MediaRef, media_of
from mmrl.vision.media.media_root import MediaRoot, decode_image
from mmrl.vision.media.prompts import answer_of, answers_of, interleaved
from mmrl.vision.media.video import FrameSampling

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@data
def visual_qa(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    prompt: str = "{question}",
    demo: str = "",
    frames_per_second: PositiveFloat = 2.0,
    max_frames: PositiveInt = 64,
    total_pixels: NonNegativeInt = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
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
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)

    def make(row: DataRow, number: int) -> Prompt:
        renamed = {ours: row.columns.get(theirs) for ours, theirs in (columns or {}).items()}
        return _prompt(dict(row.columns) | renamed, row, number, (media, sampling), prompt, demo)

    return read_prompts(source, Rows(source, media.root), make, bad_rows=bad_rows, limit=limit)


def _prompt(
    columns: Mapping[str, Any],
    row: DataRow,
    number: int,
    shown: tuple[MediaRoot, FrameSampling],
    template: str,
    demo: str,
) -> Prompt:
    words = {**columns, "question": text(columns.get("question"), "question")}
    if columns.get("choices") is not None:
        words["choices"] = _lettered(columns["choices"])
    target = answers_of(columns)
    asked = fill_template(template, words)
    media = [_medium(named, row.place, *shown) for named in media_of(columns)]
    uid = uid_of(columns, f"{row.split}#{number}")
    first = target if type(target) is str else target[0]
    answers = (Outcome(text=fill_template(demo, {**words, "answer": first})),) if demo else ()
    kept = {key: value for key, value in columns.items() if key not in ("image", "images", "video", "videos")}
    return Prompt(uid, (Message("user", interleaved(asked, media)),), target, answers, kept)


def _lettered(choices: Any) -> str:
    """Write choices as lines with letters."""
    lines = [answer_of(one, f"choices[{i}]") for i, one in enumerate(listed(choices, "choices"))]
    if len(lines) > len(LETTERS):
        raise RowError(f"wanted at most {len(LETTERS)} `choices`, one a letter, got {len(lines)}")
    return "\n".join(f"{letter}. {line}" for letter, line in zip(LETTERS, lines, strict=False))


def _medium(named: MediaRef, place: str, root: MediaRoot, sampling: FrameSampling) -> Media:
    if named.data and named.kind == "image":
        name = named.path or f"the image of {place}"
        return Media("image", name, lambda: decode_image(named.data, name), named.data)
    if named.data:
        raise RowError("a video inside a row cannot be read; write it to a file and name that")
    root.locate(named.path)
    return root.image(named.path) if named.kind == "image" else root.video(named.path, sampling)
