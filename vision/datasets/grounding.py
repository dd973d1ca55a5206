"""Temporal grounding: when does it happen?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import data
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, read_prompts
from mmrl.data.fields import RowError, text
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Row, check_spans
from mmrl.vision.benchmarks.time_spans import Moments, Span
from mmrl.vision.media.media_root import MediaRoot
from mmrl.vision.media.video import FrameSampling, video_duration

ASK = (
    'When does this happen in the video: "{query}"? Give the start and the end in seconds, in the form '
    "<answer> 1.00 to 2.00 </answer>."
)
ASK_REASONING = (
    'When does this happen in the video: "{query}"? First think about it inside <think> </think>, then '
    "give the start and the end in seconds, in the form <answer> 1.00 to 2.00 </answer>."
)


@data
def grounding(
    *,
    path: str,
    root: str,
    stream: Stream,
    format: Literal["charades_sta", "activitynet", "qvhighlights", "jsonl"] = "jsonl",
    durations: str = "",
    extension: str = ".mp4",
    frames_per_second: PositiveFloat = 2.0,
    min_frames: Annotated[PositiveInt, AtMost("max_frames")] = 4,
    max_frames: PositiveInt = 256,
    max_pixels: NonNegativeInt = 0,
    total_pixels: NonNegativeInt = 0,
    prompt: str = ASK,
    reasoning: Probability = 0.0,
    reasoning_prompt: str = ASK_REASONING,
    demo_think: Literal["none", "empty", "provided"] = "none",
    decimals: NonNegativeInt = 2,
    normalize_text: bool = True,
    clip_spans: bool = True,
    bad_rows: Literal["error", "drop"] = "error",
    unlabelled: bool = False,
    limit: NonNegativeInt = 0,
) -> list[Prompt]:
    """Read queries about videos under `root`, from an annotation file in its published form.

    A share `reasoning` of the prompts asks to think first; the same ones in every run of a seed. Every prompt
    carries the true span as a demonstration: `demo_think` gives it no think block (it is then judged by the
    format of a direct answer), an empty one, or the row's column `reasoning`. Spans that reach beyond their
    video are cut to it, unless `clip_spans` is off, as evaluators have it. Rows without a span inside their
    video are errors, or with `bad_rows: drop` named in the log and left out. `unlabelled` lets rows without
    any span stay, for rewards that read none; they have no demonstration.
    """
    source, media = Annotations(Path(path), format, durations, extension), MediaRoot(Path(root))
    sampling = FrameSampling(
        frames_per_second, min_frames, max_frames, max_pixels=max_pixels, total_pixels=total_pixels
    )
    parse = source.read

    def make(raw: DataRow, number: int) -> Prompt:
        row = parse(raw)
        located = media.locate(row.video)
        duration = video_duration(located) if row.duration is None else row.duration
        spans, reason = check_spans(row.spans, duration, clip_spans)
        if reason and (row.spans or not unlabelled):
            raise RowError(reason)
        thinks = float(torch.rand((), generator=stream.fixed("reasoning", row.uid))) < reasoning
        query = normalized(row.query) if normalize_text else row.query
        words = (reasoning_prompt if thinks else prompt).format(query=query)
        message = Message("user", (Part(media=media.video(row.video, sampling)), Part(words)))
        demos = [demonstration(row, span, thinks, demo_think, decimals) for span in spans[:1]]
        columns = {**row.columns, "query": query, "format": "think,answer" if thinks else "answer"}
        return Prompt(row.uid, (message,), Moments(spans, duration, row.saliency), tuple(demos), columns)

    return read_prompts(path, source.rows, make, bad_rows=bad_rows, limit=limit)


def demonstration(row: Row, span: Span, thinks: bool, demo_think: str, decimals: int) -> Outcome:
    """Write the true span as an answer."""
    answer = f"<answer> {span[0]:.{decimals}f} to {span[1]:.{decimals}f} </answer>"
    if not thinks or demo_think == "none":
        return Outcome(text=answer, tags={"format": "answer"})
    thought = ""
    if demo_think == "provided":
        thought = text(row.columns.get("reasoning"), "reasoning")
    return Outcome(text=f"<think>{thought}</think> {answer}", tags={"format": "think,answer"})


def normalized(query: str) -> str:
    """Strip, lower the case, and take one full stop off the end, as Time-R1 does for training."""
    query = query.strip().lower()
    return query[:-1] if query.endswith(".") else query
