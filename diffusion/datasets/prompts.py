"""Data sets of prompts, images and videos for flow-matching models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmrl.config import objects
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, named_rows, read_prompts, text_lines
from mmrl.data.fields import RowError, listed, mapping, number, text
from mmrl.data.media import MAX_IMAGE_PIXELS
from mmrl.data.separated import SEPARATED
from mmrl.data.text_files import CAPTION, Scores, holds_objects, line_uid, recorded_prompts, text_of
from mmrl.diffusion.image_io import image_size, load_image, load_video


@data
def prompts(
    *,
    path: str,
    format: Literal["", "txt", "jsonl"] = "",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Text prompts for image and video models, from a text file, JSON lines, CSV or TSV.

    A JSON object or table row has a `prompt` (or `caption`). Other keys, and the keys of `metadata`, become
    columns of the prompt; rewards compare with `target`. `id` names the prompt; without it the name is file
    and line number.

    Args:
        path: The file.
        format: `txt` (one prompt a line) or `jsonl` (one object a line); by default from the file's suffix.
        bad_rows: Unusable rows, such as prompts too long for the model, raise (`error`) or are skipped and
            logged (`drop`).
        limit: Most prompts to read; 0 is all.
    """
    source = Path(path)
    in_memory = objects.is_object(path)
    table = source.suffix in SEPARATED
    if table and format:
        raise ConfigError(
            f"'{path}' is read by the names of its columns, not as '{format}'; leave out `format`"
        )
    as_json = in_memory or (format == "jsonl" if format else holds_objects(source))

    def make(row: DataRow, number: int) -> Prompt:
        if not as_json:
            message = Message("user", (Part(row.columns["line"].strip()),))
            return Prompt(line_uid(DataRow(row.place, ""), source), (message,))
        metadata = row.columns.get("metadata")
        # The row's own keys win over those of its metadata.
        columns = {**({} if metadata is None else mapping(metadata, "metadata")), **row.all}
        message = Message("user", (Part(text_of(row.columns, CAPTION)),))
        return Prompt(line_uid(row, source), (message,), columns.get("target"), columns=columns)

    read = named_rows if as_json else text_lines
    rows = Rows(source, source.parent) if in_memory else read(source)
    reads = (CAPTION, "metadata", "target") if as_json else ("line",)
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)


@data
def images(
    *,
    path: str,
    root: str,
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
    max_pixels: PositiveInt = MAX_IMAGE_PIXELS,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Prompts with recorded images: to imitate, to compare, or to rank.

    A row has a `prompt` (or `caption`), and its images as `image` (a path), `images` (a list of paths), or
    `chosen` and `rejected`. `scores` is one number per image, stored as its reward `score`, or one list per
    name of a reward. By default a rejected image has the score 0 and any other 1. An error before training
    names all missing files.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder of the files; paths are relative to it and may not leave it.
        height: With `width`, images are cropped around the centre to this aspect ratio and resized, pixels.
        width: See `height`; 0 for both keeps the images' own sizes.
        max_pixels: Most pixels of an image file.
        bad_rows: Unusable rows, and images of a size that the model does not support, raise (`error`) or are
            skipped and logged (`drop`).
        limit: Most rows to read; 0 is all.
    """
    if bool(height) != bool(width):
        raise ValueError(f"give both height and width, or neither; got {height} and {width}")

    def read(row: Mapping[str, Any]) -> tuple[list[str], Scores]:
        match forms := sorted({"image", "images", "chosen", "rejected"} & row.keys()):
            case ["image"]:
                paths = [row["image"]]
            case ["images"] if row["images"] != []:
                paths = listed(row["images"], "images")
            case ["chosen", "rejected"]:
                paths = [row["chosen"], row["rejected"]]  # in the order of the default scores
            case _:
                raise RowError(f"wanted one of `image`, `images`, or `chosen` and `rejected`, got {forms}")
        names = [text(name, f"path of image {i}") for i, name in enumerate(paths)]
        values = row.get("scores", [1.0, 0.0] if len(forms) == 2 else [1.0] * len(names))
        by_reward = values if isinstance(values, Mapping) else {"score": values}
        scores: list[dict[str, float]] = [{} for _ in names]
        for name, numbers in by_reward.items():
            for score, value in zip(scores, listed(numbers, f"scores: {name}", len(names)), strict=True):
                # from one list per reward to one dict per image
                score[name] = number(value, f"scores: {name}")
        return names, tuple(scores)

    load = lambda file: Outcome(image=load_image(file, height, width, max_pixels))
    size = lambda file: (1, height, width) if height else (1, *image_size(file))
    reads = ("image", "images", "chosen", "rejected", "scores")
    return recorded_prompts(Path(path), Path(root), limit, read, load, size, bad_rows, reads)


@data
def videos(
    *,
    path: str,
    root: str,
    num_frames: PositiveInt,
    height: PositiveInt,
    width: PositiveInt,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Prompts with recorded videos, scored as a whole or by segment.

    A row has a `prompt` and `videos`, a list of paths. `scores` is one number per video, or one list per
    video with a number per segment of equal duration (DenseDPO, arXiv 2506.03517), for
    `diffusion.segment_preferences`. They become the reward `score`. An error before training names all
    missing files.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder of the files; paths are relative to it and may not leave it.
        num_frames: Frames to take from each video, evenly spread.
        height: Height that frames are scaled to, pixels.
        width: Width that frames are scaled to, pixels.
        bad_rows: Unusable rows raise (`error`) or are skipped and logged (`drop`).
        limit: Most rows to read; 0 is all.
    """

    def read(row: Mapping[str, Any]) -> tuple[list[str], Scores]:
        names = [text(name, f"videos[{i}]") for i, name in enumerate(listed(row.get("videos"), "videos"))]
        if not names:
            raise RowError("wanted at least one path in `videos`, got []")
        scores: list[Mapping[str, float]] = []
        for i, score in enumerate(listed(row.get("scores", [1.0] * len(names)), "scores", len(names))):
            match score:
                case []:
                    raise RowError(
                        f"wanted a number, or a list of numbers by segment, as `scores[{i}]`, got []"
                    )
                case [*values]:  # `name@k` is the reward `name` of segment k
                    scores.append({f"score@{k}": number(x, f"scores[{i}]") for k, x in enumerate(values)})
                case _:
                    scores.append({"score": number(score, f"scores[{i}]")})
        return names, tuple(scores)

    def load(file: Path) -> Outcome:
        frames, times = load_video(file, num_frames, height, width)
        return Outcome(video=frames, times=times)

    size = lambda file: (num_frames, height, width)
    return recorded_prompts(Path(path), Path(root), limit, read, load, size, bad_rows, ("videos", "scores"))
