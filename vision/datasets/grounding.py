"""Data set of temporal grounding: queries about events in videos, answered with time spans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveFloat, PositiveInt, Probability
from mmrl.config.registry import data
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, read_prompts
from mmrl.data.fields import text
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Form
from mmrl.vision.benchmarks.time_spans import Moments
from mmrl.vision.media.media_root import MediaRoot
from mmrl.vision.media.video import FrameSampling

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
    """Read queries about videos from an annotation file in its published form.

    A prompt carries its true span as a demonstration. One that asks to think does so only with a thought
    (`demo_think`): answers alone, in groups asked to think, teach the model not to think.

    Args:
        path: The annotation file.
        root: Folder of the videos.
        format: Form of the file.
        durations: CSV with the columns `id` and `length` in seconds, for Charades-STA.
        extension: Suffix that turns a video id into a file name.
        frames_per_second: Sampling rate of frames.
        min_frames: Fewest frames of a video.
        max_frames: Most frames of a video.
        max_pixels: Most pixels of a frame; 0 for no limit.
        total_pixels: Most pixels of all frames together; 0 for no limit.
        prompt: Template of the prompt, with `{query}`.
        reasoning: Share of prompts that ask to think first, the same ones in every run of a seed.
        reasoning_prompt: Template of these prompts.
        demo_think: Demonstrations of these prompts: none, or with an empty think block, or with the row's
            column `reasoning` as the thought.
        decimals: Decimals of the seconds in demonstrations.
        normalize_text: Whether queries are lower-cased and lose a final full stop, as in Time-R1.
        trim_spans: Whether spans that reach beyond their video are cut to it; evaluators do not cut.
        bad_rows: Rows without a span inside their video raise (`error`) or are skipped and logged (`drop`).
        unlabelled: Whether rows without spans are kept, for rewards that read none; they have no
            demonstration.
        limit: Most rows to read; 0 for all.
    """
    source, media = Annotations(Path(path), format, durations, extension), MediaRoot(Path(root))
    limits = {"max_pixels": max_pixels, "total_pixels": total_pixels}
    sampling = FrameSampling(frames_per_second, min_frames, max_frames, **limits)

    def make(raw: DataRow, number: int) -> Prompt:
        row = source.parse(raw).inside_video(media, trim_spans, unlabelled)
        # By id, so that neither order nor `limit` matters.
        thinks = float(torch.rand((), generator=stream.fixed("reasoning", row.uid))) < reasoning
        query = row.query.strip().lower().removesuffix(".") if normalize_text else row.query
        words = (reasoning_prompt if thinks else prompt).format(query=query)
        message = Message("user", (Part(media=media.video(row.video, sampling)), Part(words)))
        demos = []
        shown = row.spans[:1] if not thinks or demo_think != "none" else ()
        for start, end in shown:
            answer, form = f"<answer> {start:.{decimals}f} to {end:.{decimals}f} </answer>", "answer"
            if thinks:
                thought = text(row.columns.get("reasoning"), "reasoning") if demo_think == "provided" else ""
                answer, form = f"<think>{thought}</think> {answer}", "think,answer"
            demos.append(Outcome(text=answer, tags={"format": form}))
        columns = {**row.columns, "query": query, "format": "think,answer" if thinks else "answer"}
        target = Moments(row.spans, row.duration, row.saliency)
        return Prompt(row.uid, (message,), target, tuple(demos), columns)

    return read_prompts(path, source, make, reads=source.reads, bad_rows=bad_rows, limit=limit)
