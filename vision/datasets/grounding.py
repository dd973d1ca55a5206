"""Temporal grounding: when does it happen?"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch

from mmrl.draws import Stream
from mmrl.registry import data
from mmrl.types import Message, Outcome, Part, Prompt
from mmrl.vision.annotations import READERS, Row, check_spans
from mmrl.vision.media import MediaRoot
from mmrl.vision.spans import Moments, Span
from mmrl.vision.video import MediaError, Sampling, video_duration

ASK = (
    'When does this happen in the video: "{query}"? Give the start and the end in seconds, in the form '
    "<answer> 1.00 to 2.00 </answer>."
)
ASK_REASONING = (
    'When does this happen in the video: "{query}"? First think about it inside <think> </think>, then '
    "give the start and the end in seconds, in the form <answer> 1.00 to 2.00 </answer>."
)

log = logging.getLogger("mmrl")


@data
def grounding(
    *,
    path: str,
    root: str,
    stream: Stream,
    format: Literal["charades_sta", "activitynet", "qvhighlights", "jsonl"] = "jsonl",
    durations: str = "",
    extension: str = ".mp4",
    frames_per_second: float = 2.0,
    min_frames: int = 4,
    max_frames: int = 256,
    max_pixels: int = 0,
    total_pixels: int = 0,
    prompt: str = ASK,
    reasoning: float = 0.0,
    reasoning_prompt: str = ASK_REASONING,
    demo_think: Literal["none", "empty", "provided"] = "none",
    decimals: int = 2,
    normalize_text: bool = True,
    clip_spans: bool = True,
    bad_rows: Literal["error", "drop"] = "error",
    unlabelled: bool = False,
    limit: int = 0,
) -> list[Prompt]:
    """Read queries about videos under `root`, from an annotation file in its published form.

    A share `reasoning` of the prompts asks to think first; the same ones in every run of a seed. Every prompt
    carries the true span as a demonstration: `demo_think` gives it no think block (it is then judged by the
    format of a direct answer), an empty one, or the row's column `reasoning`. Spans that reach beyond their
    video are cut to it, unless `clip_spans` is off, as evaluators have it. Rows without a span inside their
    video are errors, or with `bad_rows: drop` named in the log and left out. `unlabelled` lets rows without
    any span stay, for rewards that read none; they have no demonstration.
    """
    source, media = Path(path), MediaRoot(Path(root))
    if not source.is_file():
        raise ValueError(f"there is no annotation file '{source}'")
    sampling = Sampling(
        frames_per_second, min_frames, max_frames, max_pixels=max_pixels, total_pixels=total_pixels
    )
    prompts, bad = [], []
    for row in _distinct(READERS[format](source, Path(durations) if durations else None, extension)):
        duration = _duration(row, media)
        spans, reason = check_spans(row.spans, duration, clip_spans)
        if reason and (row.spans or not unlabelled):
            bad.append(f"{row.place}: {reason}")
            continue
        thinks = float(torch.rand((), generator=stream.fixed("reasoning", row.uid))) < reasoning
        query = normalized(row.query) if normalize_text else row.query
        text = (reasoning_prompt if thinks else prompt).format(query=query)
        message = Message("user", (Part(media=media.video(row.video, sampling)), Part(text)))
        demos = [demonstration(row, span, thinks, demo_think, decimals) for span in spans[:1]]
        columns = {**row.columns, "query": query, "format": "think,answer" if thinks else "answer"}
        prompts.append(
            Prompt(row.uid, (message,), Moments(spans, duration, row.saliency), tuple(demos), columns)
        )
        if len(prompts) == limit:
            break
    _report(bad, len(prompts), source, bad_rows)
    return prompts


def _report(bad: list[str], kept: int, source: Path, bad_rows: str) -> None:
    """Refuse rows that cannot be used, or name them in the log, and refuse a file without any other."""
    if bad and bad_rows == "error":
        shown = "\n  ".join(bad[:10])
        raise ValueError(
            f"{len(bad)} rows of '{source}' cannot be used; mend them, or set `bad_rows: drop`:\n  {shown}"
        )
    for line in bad:
        log.warning("dropped %s", line)
    if not kept:
        raise ValueError(f"the annotation file '{source}' holds no row that can be used")


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Refuse two rows of one id: their answers would be compared as one group."""
    places: dict[str, str] = {}
    for row in rows:
        if row.uid in places:
            raise ValueError(f"{row.place}: the id '{row.uid}' is that of {places[row.uid]}")
        places[row.uid] = row.place
        yield row


def _duration(row: Row, media: MediaRoot) -> float:
    """Find the video of a row, and how many seconds it lasts."""
    try:
        path = media.locate(row.video)
        return row.duration if row.duration is not None else video_duration(path)
    except MediaError as error:
        raise MediaError(f"{row.place}: {error}") from error


def demonstration(row: Row, span: Span, thinks: bool, demo_think: str, decimals: int) -> Outcome:
    """Write the true span as an answer."""
    text = f"<answer> {span[0]:.{decimals}f} to {span[1]:.{decimals}f} </answer>"
    if not thinks or demo_think == "none":
        return Outcome(text=text, tags={"format": "answer"})
    thought = ""
    if demo_think == "provided":
        if "reasoning" not in row.columns:
            raise ValueError(f"{row.place}: `demo_think: provided` wants a column `reasoning`")
        thought = row.columns["reasoning"]
    return Outcome(text=f"<think>{thought}</think> {text}", tags={"format": "think,answer"})


def normalized(query: str) -> str:
    """Strip, lower the case, and take one full stop off the end, as Time-R1 does for training."""
    query = query.strip().lower()
    return query[:-1] if query.endswith(".") else query
