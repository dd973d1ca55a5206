"""Builder that converts published annotations of temporal grounding to jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.config.registry import builder
from mmrl.data.dataset_io import write_rows
from mmrl.data.fields import RowError
from mmrl.data.media_root import MediaRef, MediaRoot
from mmrl.vision.benchmarks.grounding_annotations import Annotations, Form
from mmrl.vision.media.dataset_writer import BuildLog, MediaWriter


@builder
@dataclass(kw_only=True)
class TemporalGrounding:
    """Convert Charades-STA, ActivityNet Captions or QVHighlights to one jsonl for `vision.grounding`.

    A row has `video`, `query`, `spans`, `duration`, `id`, and `saliency` if the source contains it.

    Args:
        format: Format of the annotation file.
        path: The annotation file.
        root: Folder of the videos. Video paths are relative to this folder, or with `copy` to the output.
        split: Name of the split that is written.
        durations: CSV file with the columns `id` and `length` in seconds. Durations that are missing here and
            in the annotations are read from the videos.
        extension: Suffix that is appended to a video id to get its file name.
        trim_spans: Whether to clip spans to the duration of their video.
        copy: Whether the videos are copied to the output.
        bad_rows: Treatment of rows without a video file or with a span outside the video. `error`: raise an
            error. `drop`: omit them and list them in the manifest.
    """

    format: Form
    path: str
    root: str
    split: str = "train"
    durations: str = ""
    extension: str = ".mp4"
    trim_spans: bool = True
    copy: bool = False
    bad_rows: Literal["error", "drop"] = "error"

    def build(self, output: Path) -> dict[str, Any]:
        """Write the rows; return the number of rows in the split."""
        log = BuildLog(self.bad_rows)
        media = MediaWriter(MediaRoot(Path(self.root)), output, "videos")
        source, rows = Annotations(Path(self.path), self.format, self.durations, self.extension), []
        for raw in source:
            with log.dropping(raw.place):
                if raw.fault:
                    raise RowError(raw.fault)
                query = source.parse(raw).inside_video(media.root, self.trim_spans)
                video = media.put(MediaRef("video", query.video)) if self.copy else query.video
                row = {"id": query.uid, "video": video, "query": query.query.strip()}
                row |= {"spans": list(map(list, query.spans)), "duration": query.duration}
                rows.append(row | ({"saliency": list(map(list, query.saliency))} if query.saliency else {}))
        if rows:  # without rows, `finish` raises an error
            log.kept[self.split] = len(rows)
            write_rows(output / f"{self.split}.jsonl", rows)
        stored = "copied" if self.copy else "in place"
        return log.finish(output, {"source": source.path.name, "format": self.format, "media": stored})
