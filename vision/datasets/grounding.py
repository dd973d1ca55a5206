"""Data set of temporal grounding: queries about events in videos, answered with time spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import data
from mmrl.core.rng import Stream
from mmrl.core.types import Media, Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, read_prompts
from mmrl.data.fields import text
from mmrl.data.media_root import MediaRoot
from mmrl.data.video import FrameSampling
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Form, Query
from mmrl.vision.benchmarks.time_spans import Moments

ASK = (
    'When does this happen in the video: "{query}"? Give the start and the end in seconds, in the form '
    "<answer> 1.00 to 2.00 </answer>."
)
ASK_REASONING = (
    'When does this happen in the video: "{query}"? First think about it inside <think> </think>, then '
    "give the start and the end in seconds, in the form <answer> 1.00 to 2.00 </answer>."
)


@data(sets_tags={"format"})
def grounding(
    *,
    path: str,
    root: str,
    stream: Stream,
    format: Form = "jsonl",
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
    trim_spans: bool = True,
    bad_rows: Literal["error", "drop"] = "error",
    unlabelled: bool = False,
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read queries about videos from an annotation file in a published format or our own (`jsonl`).

    Args:
        path: The annotation file.
        root: Folder of the videos.
        format: Format of the annotation file.
        durations: CSV file with the columns `id` and `length` in seconds, for Charades-STA.
        extension: Suffix that is appended to a video id to get its file name.
        frames_per_second: Sampling rate of video frames.
        min_frames: Minimum number of frames per video.
        max_frames: Maximum number of frames per video.
        max_pixels: Maximum number of pixels per frame; 0: no limit.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        prompt: Template of the prompt, with `{query}`.
        reasoning: Probability that a prompt asks the model to think first; drawn from the seed and row id.
        reasoning_prompt: Template of the prompts that ask the model to think first.
        demo_think: Thought of demonstrations: `none` (no demonstration), `empty`, `provided` (`reasoning`).
        decimals: Number of decimals of the seconds in demonstrations.
        normalize_text: Whether to lower-case queries and to remove a final full stop, as in Time-R1.
        trim_spans: Whether to clip spans to the duration of their video; official evaluators do not.
        bad_rows: Rows without a span inside their video. `error`: raise an error. `drop`: skip and log them.
        unlabelled: Whether to keep rows without spans, for rewards that need no spans.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source, media = Annotations(Path(path), format, durations, extension), MediaRoot(Path(root))
    limits = {"max_pixels": max_pixels, "total_pixels": total_pixels}
    sampling = FrameSampling(frames_per_second, min_frames, max_frames, **limits)

    def make(raw: DataRow, number: int) -> Prompt:
        row = source.parse(raw).inside_video(media, trim_spans, unlabelled)
        thinks = float(torch.rand((), generator=stream.fixed("reasoning", row.uid))) < reasoning
        query = row.query.strip().lower().removesuffix(".") if normalize_text else row.query
        words = (reasoning_prompt if thinks else prompt).format(query=query)
        return prompt_of(row, media.video(row.video, sampling), query, words, thinks and demo_think, decimals)

    return read_prompts(path, source, make, reads=source.reads, bad_rows=bad_rows, limit=limit)


def prompt_of(
    row: Query, video: Media, query: str, words: str, thought: str | Literal[False], decimals: int
) -> Prompt:
    """Create the prompt of a row, with its first span as a demonstration.

    `thought` is the option `demo_think` if the prompt asks the model to think first, else False. With `none`,
    there is no demonstration, because one without a thought would teach the model not to think.
    """
    form, demos = "think,answer" if thought else "answer", []
    for start, end in row.spans[:1] if thought != "none" else ():
        answer = f"<answer> {start:.{decimals}f} to {end:.{decimals}f} </answer>"
        if thought:
            inside = text(row.columns.get("reasoning"), "reasoning") if thought == "provided" else ""
            answer = f"<think>{inside}</think> {answer}"
        demos.append(Outcome(text=answer, tags={"format": form}))
    columns = {**row.columns, "query": query, "format": form}
    target = Moments(row.spans, row.duration, row.saliency)
    message = Message("user", (Part(media=video), Part(words)))
    return Prompt(row.uid, (message,), target, tuple(demos), columns)
