"""Data set of single answers with a label, desirable or undesirable, for KTO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.modalities import media_columns
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import uid_of
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling
from mmrl.vision.datasets.preference_rows import (
    QUESTIONS,
    REJECTED,
    RowMedia,
    label_of,
    question_and_answer,
    tools_of,
)

ASKING = tuple(name for name in QUESTIONS if name not in REJECTED)
LEFT_OUT = (*ASKING, "completion", *media_columns())


@data
def unpaired_preferences(
    *,
    path: str,
    root: str = "",
    frames_per_second: PositiveFloat = 2.0,
    max_frames: PositiveInt = 64,
    total_pixels: NonNegativeInt = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read answers labelled desirable or undesirable, in the columns of TRL, LLaMA-Factory or ms-swift.

    TRL: `prompt`, `completion`, `label`. LLaMA-Factory: `conversations` or `messages`, or `instruction`,
    `input` and `output`, with `kto_tag`. ms-swift: `messages` or `query` and `response`, with `label`. Labels
    are true or false (1 or 0). The answer is the `completion`, or all turns after the last message of the
    user; of these, the turns of the assistant are trained on. `system`, `tools` and media are as in
    `vision.preference_pairs`. The answer records `label`: 1 for a desirable answer, else -1.

    KTO (arXiv 2402.01306) learns from such answers with `methods/preference/kto.yaml`, the reward
    `{name: precomputed, key: label}`, the chain `[total, kto_kl_rows]` and `num_generations: 2`.

    Args:
        path: A file of jsonl, JSON or parquet, or a folder of such files.
        root: Folder of the media; by default the folder of the rows.
        frames_per_second: Sampling rate of video frames.
        max_frames: Maximum number of frames per video.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)

    def make(row: DataRow, number: int) -> Prompt:
        columns = row.columns
        kept = {key: value for key, value in row.all.items() if key not in LEFT_OUT}
        label = label_of(columns)
        question, answer = question_and_answer(columns)
        messages, read = RowMedia(media, columns, row.place, sampling).read(question, answer, "completion")
        answers = (replace(read, recorded={"label": label}),)
        uid = uid_of(columns, f"{row.split}#{number}")
        return Prompt(uid, messages, None, answers, kept, tools=tools_of(columns))

    reads = (*LEFT_OUT, "label", "kto_tag")
    return read_prompts(source, Rows(source, media.root), make, reads=reads, bad_rows=bad_rows, limit=limit)
