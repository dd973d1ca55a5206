"""Published annotations of temporal grounding as plain rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import builder
from mmrl.data.dataset_io import write_rows
from mmrl.data.fields import RowError
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Row, check_spans
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter
from mmrl.vision.media.media_columns import MediaRef
from mmrl.vision.media.media_root import MediaRoot
from mmrl.vision.media.video import video_duration


@builder
class TemporalGrounding:
    """Turn Charades-STA, ActivityNet Captions or QVHighlights into one jsonl for `vision.grounding`.

    A row holds `video` (relative to `root`, or with `copy` to the output), `query`, `spans`, `duration`,
    `id`, and `saliency` where there is any. Durations come from the file, from `durations` (a CSV with `id`
    and `length`), or from the clips. Spans are cut to their clip unless `clip_spans` is off. Rows whose clip
    is missing or whose span lies outside are errors, or with `bad_rows: drop` named in the manifest.
    """

    def __init__(
        self,
        *,
        format: Literal["charades_sta", "activitynet", "qvhighlights", "jsonl"],
        path: str,
        root: str,
        split: str = "train",
        durations: str = "",
        extension: str = ".mp4",
        clip_spans: bool = True,
        copy: bool = False,
        bad_rows: Literal["error", "drop"] = "error",
    ) -> None:
        self.format, self.path, self.root, self.split = format, Path(path), Path(root), split
        self.durations, self.extension = durations, extension
        self.clip_spans, self.copy, self.bad_rows = clip_spans, copy, bad_rows

    def build(self, output: Path) -> dict[str, Any]:
        """Write the rows, and tell how many."""
        ledger = BuildLog(self.bad_rows)
        media = MediaWriter(MediaRoot(self.root), output, "videos")
        source = Annotations(self.path, self.format, self.durations, self.extension)
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
        told = {
            "source": self.path.name,
            "format": self.format,
            "media": "copied" if self.copy else "in place",
        }
        return ledger.finish(output, told)

    def _row(self, row: Row, media: MediaWriter) -> dict[str, Any]:
        located = media.root.locate(row.video)
        duration = video_duration(located) if row.duration is None else row.duration
        spans, reason = check_spans(row.spans, duration, self.clip_spans)
        if reason:
            raise RowError(reason)
        video = media.put(MediaRef("video", row.video)) if self.copy else row.video
        written = {"id": row.uid, "video": video, "query": row.query.strip(), "spans": list(map(list, spans))}
        written["duration"] = duration
        return written | ({"saliency": list(map(list, row.saliency))} if row.saliency else {})
