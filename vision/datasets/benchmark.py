"""Data set of question benchmarks in their published files: MMMU, MathVista, MMBench and others."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.modalities import media_columns
from mmrl.core.types import Media, Message, Prompt
from mmrl.data.dataset_io import DataRow, read_prompts
from mmrl.data.fields import RowError, fill_template, template_fields
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import declared
from mmrl.data.video import FrameSampling, sample_times, video_duration
from mmrl.vision.benchmarks.answer_rules import Benchmark
from mmrl.vision.benchmarks.benchmark_files import attach_answers, read_answers
from mmrl.vision.benchmarks.question_formats import FORMATS, Item, benchmark_rows
from mmrl.vision.media.frame_folder import video_or_folder
from mmrl.vision.media.subtitles import read_subtitles, subtitles_at

CLUSTER = "cluster"
HEAD = "This video's subtitles are listed below:\n"
log = logging.getLogger("mmrl")


@data(sets_tags={CLUSTER})
def benchmark(
    *,
    path: str,
    format: Benchmark,
    root: str = "",
    answers: str = "",
    prompt: str = "",
    open_prompt: str = "",
    extension: str = ".mp4",
    subtitles: str = "",
    frames_per_second: PositiveFloat = 2.0,
    max_frames: PositiveInt = 64,
    total_pixels: NonNegativeInt = 0,
    unlabelled: bool = False,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read a question benchmark from the files that people download, for `vision.benchmark_answer`.

    Args:
        path: File or folder of rows as published; a pattern such as `data/MMMU/*/validation*` names several.
        format: The benchmark.
        root: Folder of the images or videos; by default the folder of the rows.
        answers: File of precomputed answers with ids; media are then not needed.
        prompt: Template of the prompt, with `{question}`, `{choices}` as lettered lines, `{hint}` (MMBench),
            `{subtitles}` (Video-MME), or any other column; empty: the benchmark's own.
        open_prompt: Template for questions without choices; empty: the benchmark's own.
        extension: Suffix that is appended to Video-MME's `videoID`.
        subtitles: Folder of Video-MME's subtitles, `<videoID>.srt`; the prompt has those at sampled frames.
        frames_per_second: Sampling rate of video frames.
        max_frames: Maximum number of frames per video.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        unlabelled: Whether to keep rows whose answer is not published; their rewards are None.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source, form = Path(path), FORMATS[format]
    media = MediaRoot.of_rows(source, root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)
    shown = _Shown(media, sampling, Path(subtitles) if subtitles else None, extension, bool(answers))
    templates = {True: prompt or form.prompt, False: open_prompt or form.open_prompt or form.prompt}

    def make(row: DataRow, place: int) -> Prompt:
        item = form.parse(row.columns, row, place)
        if not item.answers and not unlabelled:
            raise RowError("its answer is not published; `unlabelled: true` keeps it, for predictions alone")
        words = {**row.all, **form.words(item), "subtitles": shown.subtitles(item) if subtitles else ""}
        asked, parts = shown.placed(item, fill_template(templates[bool(item.choices)], words), row.place)
        kept = {key: value for key, value in row.others.items() if key not in media_columns()}
        kept |= {**item.named, "benchmark": format, "choices": list(item.choices)}
        right = item.answers[0] if len(item.answers) == 1 else item.answers or None
        shown.rotations[item.cluster].add(item.uid)
        tags = {CLUSTER: item.cluster} if item.cluster else {}
        return Prompt(item.uid, (Message("user", interleaved(asked, parts)),), right, (), kept, tags=tags)

    reads = declared((*form.reads, *template_fields(*templates.values())))
    rows = benchmark_rows(source, format)
    prompts = read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)
    shown.name_missing(source, circular=format == "mmbench")
    return attach_answers(prompts, read_answers(Path(answers)) if answers else {}, answers, limit)


@dataclass
class _Shown:
    """Finds the media and subtitles of rows. If recorded answers are `scored`, files need not exist."""

    media: MediaRoot
    sampling: FrameSampling
    folder: Path | None
    extension: str
    scored: bool
    images: dict[str, Media] = field(default_factory=dict)  # maps the id of a row to its image
    missing: set[str] = field(default_factory=set)  # names of videos without subtitles
    rotations: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # maps `cluster` to uids

    def placed(self, item: Item, text: str, place: str) -> tuple[str, list[Media]]:
        """Return the text of a prompt with placeholders for its media, and the media in the same order."""
        if item.image_of:
            if item.image_of not in self.images:
                raise RowError(f"it shows the image of row {item.image_of}, which is not before it")
            return text, [self.images[item.image_of]]
        made = {mark: self._medium(item, kind, value, place) for kind, value, mark in item.media}
        if "" in made:
            self.images[item.uid] = made[""]
            return text, [made[""]]
        marks = [mark for mark in made if mark not in text]  # media without a mark come first
        text = "".join(marks) + text
        if not made:
            return text, []
        any_mark = re.compile("|".join(map(re.escape, made)))
        found = [made[mark] for mark in any_mark.findall(text)]
        return any_mark.sub(f"<{item.media[0][0]}>", text), found

    def _medium(self, item: Item, kind: str, value: Any, place: str) -> Media:
        if kind == "video":
            value = self._video(item)
            sampling = replace(self.sampling, start=item.bounds[0], end=item.bounds[1])
            if self.scored:
                return self.media.video(value, sampling)
            return video_or_folder(self.media, value, sampling)
        refs = list(media_refs(value, kind, kind))
        if len(refs) != 1:
            raise RowError(f"wanted one {kind}, got {len(refs)}")
        if self.scored and not refs[0].data:
            return self.media.file(kind, refs[0].path)
        return self.media.medium(refs[0], place, self.sampling)

    def _video(self, item: Item) -> str:
        """Return the path of an item's video; Video-MME's ids lack the suffix, which is appended."""
        name = str(item.media[0][1])
        return name + self.extension if item.named.get("video") == name else name

    def name_missing(self, source: Path, *, circular: bool) -> None:
        """Warn of videos without subtitles, and with `circular` if each question has only one rotation."""
        if circular and max(map(len, self.rotations.values())) == 1:
            log.warning("'%s' asks every question once; CircularEval needs the rows of all rotations", source)
        if self.missing:
            videos = len(self.rotations)
            log.warning("%d of %d videos have no subtitles in '%s'", len(self.missing), videos, self.folder)

    def subtitles(self, item: Item) -> str:
        """Return the subtitles at the sampled frames, with a heading; "" for a video without any."""
        assert self.folder is not None
        name = f"{item.named.get('video', '')}.srt"
        if Path(name).name != name:
            raise RowError(f"the id of a video is no path: '{name}'")
        if not (self.folder / name).is_file():
            self.missing.add(item.cluster)
            return ""
        video = self.media.locate(self._video(item))
        times = sample_times(0.0, video_duration(video), self.sampling)
        return f"{HEAD}{subtitles_at(read_subtitles(MediaRoot(self.folder).locate(name)), times)}\n"
