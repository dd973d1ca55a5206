"""Data set of questions about images and videos with verifiable answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.modalities import media_columns
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import fill_template, template_fields, text, uid_of
from mmrl.data.media_root import EITHER, MediaRoot, media_of
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import declared, has_content
from mmrl.data.video import FrameSampling
from mmrl.vision.media.prompts import answers_of, lettered

log = logging.getLogger("mmrl")
DRAWN = tuple(name for name in EITHER if name not in ("chosen", "rejected"))  # prompt media columns
READS = ("question", ("answer", "answers"), "choices", "system", *DRAWN)


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
) -> Sequence[Prompt]:
    """Read questions, media and answers from jsonl, JSON, parquet or a folder saved by `datasets`.

    A row has `question`, `answer` (or `answers`, a list of correct answers), optionally `choices` and
    `system`, and media in `image`, `images`, `video` or `videos`: paths or encoded images. Media replace the
    placeholders <image> and <video> in the question, or precede the question.

    Args:
        path: The file or folder of rows.
        root: Folder of the media; by default the folder of the rows.
        columns: Maps the column names above to columns of the file; an empty name omits a column.
        prompt: Template of the prompt, with `{question}`, `{choices}` as lettered lines, or any other column.
        demo: Template of a demonstration, such as "<answer>{answer}</answer>"; empty: no demonstration.
        frames_per_second: Sampling rate of video frames.
        max_frames: Maximum number of frames per video.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source, media = Path(path), MediaRoot.of_rows(Path(path), root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)
    hidden = set[str]()  # locations of rows whose choices are not in the prompt

    def make(row: DataRow, number: int) -> Prompt:
        fields = row.renamed(columns)
        words = {**fields, "question": text(fields.get("question"), "question")}
        if fields.get("choices") is not None:
            lines = lettered(fields["choices"])
            words["choices"] = "\n".join(lines)
            shown = all(line.partition(" ")[2] in words["question"] for line in lines)
            if "choices" not in template_fields(prompt) and not shown:
                hidden.add(row.place)
        target, question = answers_of(fields), fill_template(prompt, words)
        shown = [media.medium(ref, row.place, sampling) for ref in media_of(fields)]
        uid, first = uid_of(fields, f"{row.split}#{number}"), target if type(target) is str else target[0]
        answers = (Outcome(text=fill_template(demo, {**words, "answer": first})),) if demo else ()
        kept = {key: v for key, v in {**row.others, **fields}.items() if key not in media_columns()}
        system = fields.get("system")
        head = (Message("system", (Part(text(system, "system")),)),) if has_content(system) else ()
        return Prompt(uid, (*head, Message("user", interleaved(question, shown))), target, answers, kept)

    reads = declared((*READS, *media_columns(), *template_fields(prompt, demo)), columns)
    rows = Rows(source, media.root)
    prompts = read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)
    if hidden:
        wanted = "the prompt does not show the `choices` of %d rows of '%s'; write {choices} into `prompt`"
        log.warning(wanted, len(hidden), source)
    return prompts
