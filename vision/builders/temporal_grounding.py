"""Builder that converts published annotations of temporal grounding to jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import builder
from mmrl.data.dataset_io import write_rows
from mmrl.data.fields import RowError
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Query, check_spans
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter
from mmrl.vision.media.media_root import MediaRef, MediaRoot
from mmrl.vision.media.video import video_duration


@builder
@dataclass(kw_only=True)
class TemporalGrounding:
    """Convert Charades-STA, ActivityNet Captions or QVHighlights to one jsonl for `vision.grounding`.

    A row has `video`, `query`, `spans`, `duration`, `id`, and `saliency` where the source has any.

    Args:
        format: Form of the annotation file.
        path: The annotation file.
        root: Folder of the videos; video paths are relative to it, or with `copy` to the output.
        split: Name of the split that is written.
        durations: CSV with the columns `id` and `length` in seconds. Durations that neither the annotations
            nor this file contain are read from the videos.
        extension: Suffix that turns a video id into a file name.
        trim_spans: Whether spans that reach beyond their video are cut to it.
        copy: Whether the videos are copied to the output.
        bad_rows: Rows without their video, or whose span lies outside it, raise (`error`) or are listed in
            the manifest (`drop`).
    """

    format: Literal["charades_sta", "activitynet", "qvhighlights", "jsonl"]
    path: str
    root: str
    split: str = "train"
    durations: str = ""
    extension: str = ".mp4"
    trim_spans: bool = True
    copy: bool = False
    bad_rows: Literal["error", "drop"] = "error"

    def build(self, output: Path) -> dict[str, Any]:
        """Write the rows; return the number of each split."""
        ledger = BuildLog(self.bad_rows)
        media = MediaWriter(MediaRoot(Path(self.root)), output, "videos")
        source = Annotations(Path(self.path), self.format, self.durations, self.extension)
        rows, parse = [], source.read
        for raw in source.rows:
            try:
                if raw.fault:
                    raise RowError(raw.fault)
                rows.append(self._row(parse(raw), media))
            except RowError as error:
                ledger.drop(raw.place, str(error))
        if rows:
            ledger.kept[self.split] = len(rows)
            write_rows(output / f"{self.split}.jsonl", rows)
        stored = "copied" if self.copy else "in place"
        return ledger.finish(output, {"source": source.path.name, "format": self.format, "media": stored})

    def _row(self, row: Query, media: MediaWriter) -> dict[str, Any]:
        located = media.root.locate(row.video)
        duration = video_duration(located) if row.duration is None else row.duration
        spans, reason = check_spans(row.spans, duration, self.trim_spans)
        if reason:
            raise RowError(reason)
        video = media.put(MediaRef("video", row.video)) if self.copy else row.video
        written = {"id": row.uid, "video": video, "query": row.query.strip(), "spans": list(map(list, spans))}
        written["duration"] = duration
        return written | ({"saliency": list(map(list, row.saliency))} if row.saliency else {})
