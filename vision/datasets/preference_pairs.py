"""Data set of preference pairs: a chosen and a rejected answer to prompts about images, videos and sounds."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.modalities import media_columns
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, listed, number, short, uid_of, unpacked
from mmrl.data.media_root import MediaRoot
from mmrl.data.row_fields import has_content
from mmrl.data.row_files import Found, RowFile
from mmrl.data.video import FrameSampling
from mmrl.vision.datasets.preference_rows import (
    EXPORTED,
    OTHER_MEDIA,
    QUESTIONS,
    SIDES,
    RowMedia,
    question_and_sides,
    split_pair,
    tools_of,
)

log = logging.getLogger("mmrl")
LEFT_OUT = (*QUESTIONS, *media_columns(), *OTHER_MEDIA, *SIDES, *EXPORTED)
READS = (*LEFT_OUT, "score_chosen", "score_rejected")


@data
def preference_pairs(
    *,
    path: str,
    root: str = "",
    frames_per_second: PositiveFloat = 2.0,
    max_frames: PositiveInt = 64,
    total_pixels: NonNegativeInt = 0,
    min_gap: NonNegativeFloat = 0.0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read preference pairs in the columns of TRL, LLaMA-Factory or ms-swift.

    TRL: `prompt` (or `question` or `messages`), `chosen` and `rejected`. LLaMA-Factory: `conversations`, or
    `instruction`, `input` and `history`, with `chosen` and `rejected`. ms-swift: `messages` whose last one is
    the chosen answer, with `rejected_response` or `rejected_messages`. All may have a `system` prompt. A
    prompt is a text or messages. `chosen` and `rejected` are one answer each, or two conversations with the
    prompt as their common beginning; then all turns of the assistant after this beginning are trained on,
    and messages of tools and of the user are not. `tools` are listed in the prompt.
    A list of rejected answers gives one pair for each of them; the second pair of the row `id` has the id
    `id/2`. `score_rejected` may then be a list of the same length.

    Media in `image`, `images`, `video`, `videos`, `audio` and `audios` are paths or encoded media. They
    fill the placeholders in the messages, or begin the first user message. `rejected_images` (and
    `_videos`, `_audios`) replace them for the rejected answer; message parts may also contain their media.

    The prompt stores the chosen answer first and the rejected one second. Both record `preferred` (1 or 0)
    and `score`: the columns `score_chosen` and `score_rejected` if the row has both, otherwise `preferred`.

    Args:
        path: A file of jsonl, JSON or parquet, or a folder of such files.
        root: Folder of the media; by default the folder of the rows.
        frames_per_second: Sampling rate of video frames.
        max_frames: Maximum number of frames per video.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        min_gap: Pairs whose scores differ by less than this are skipped.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of pairs to read; 0: all pairs.
    """
    source = Path(path)
    root_of_media = MediaRoot.of_rows(source, root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)
    close = 0

    def make(row: DataRow, position: int) -> Prompt | None:
        nonlocal close
        prompt = _pair(row, RowMedia(root_of_media, row.columns, row.place, sampling), position)
        better, worse = (answer.recorded["score"] for answer in prompt.answers)
        if abs(better - worse) < min_gap:
            close += 1
            return None
        return prompt

    rows = (part for row in Rows(source, root_of_media.root) for part in _each_rejected(row))
    prompts = read_prompts(source, rows, make, reads=READS, bad_rows=bad_rows, limit=limit)
    if close:
        log.warning("left out %d pairs of '%s' that are less than %g apart", close, source, min_gap)
    return prompts


def _pair(row: DataRow, media: RowMedia, position: int) -> Prompt:
    """Read the prompt of a row with its chosen and its rejected answer."""
    columns = row.columns
    kept = {key: value for key, value in row.all.items() if key not in LEFT_OUT}
    question, *sides = question_and_sides(columns)
    (messages, chosen), (asked, rejected) = (
        media.read(*side, name, rejected=name == "rejected")
        for side, name in zip(split_pair(question, sides), SIDES, strict=True)
    )
    rejected = replace(rejected, asked=() if asked == messages else asked)
    contents = [(one.asked, one.turns, (one.text or "").strip(), one.extra) for one in (chosen, rejected)]
    if contents[0] == contents[1]:
        raise RowError(f"wanted `chosen` and `rejected` that differ, got {short(chosen.text)} twice")
    margin = unpacked(row.all.get("margin"))  # TRL's column, which `pair_column` reads during training
    for value in margin if isinstance(margin, list) else [margin] * has_content(margin):
        number(value, "margin")
    answers = tuple(
        replace(answer, recorded=recorded)
        for answer, recorded in zip((chosen, rejected), _recorded(columns), strict=True)
    )
    uid = uid_of(columns, f"{row.split}#{position}")
    return Prompt(uid, messages, None, answers, kept, tools=tools_of(columns))


@dataclass(frozen=True)
class _RejectedFile:
    """View of a data file in which every row keeps only rejected answer number `place` of its list."""

    file: RowFile
    place: int

    def row(self, found: Found) -> DataRow:
        return list(_each_rejected(self.file.row(found._replace(file=self.file))))[self.place]


def _each_rejected(row: DataRow) -> Iterator[DataRow]:
    """Split a row with several rejected answers (texts or lists of messages) into one row per answer."""
    name = next((n for n in ("rejected", "rejected_response") if row.columns.get(n) is not None), "rejected")
    several, scores = unpacked(row.columns.get(name)), unpacked(row.columns.get("score_rejected"))
    if not (isinstance(several, list) and len(several) > 1 and all(type(s) in (str, list) for s in several)):
        yield row
        return
    for place, rejected in enumerate(several):
        own: dict[str, Any] = {name: rejected}
        if isinstance(scores, list):
            own["score_rejected"] = listed(scores, "score_rejected", len(several))[place]
        if place and row.columns.get("id") is not None:
            own["id"] = f"{row.columns['id']}/{place + 1}"
        location = row.found and row.found._replace(file=_RejectedFile(row.found.file, place))
        yield replace(row, columns={**row.columns, **own}, found=location)


def _recorded(columns: Mapping[str, Any]) -> Iterator[Mapping[str, float]]:
    """Yield the record of the chosen, then of the rejected answer: whether it is preferred, and its score."""
    names = [f"score_{side}" for side in SIDES]
    given = [has_content(columns.get(name)) for name in names]
    if any(given) and not all(given):
        has, lacks = names if given[0] else names[::-1]
        raise RowError(f"wanted both scores of the pair, got `{has}` without `{lacks}`")
    for preferred, name in zip((1.0, 0.0), names, strict=True):
        yield {"preferred": preferred, "score": number(columns[name], name) if all(given) else preferred}
