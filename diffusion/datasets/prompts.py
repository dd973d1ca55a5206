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
from mmrl.data.row_sizes import SIZE, row_size
from mmrl.data.separated import SEPARATED
from mmrl.data.text_files import CAPTION, Scores, holds_objects, line_uid, recorded_prompts, text_of
from mmrl.diffusion.image_io import image_size, load_image, load_video


@data
def prompts(
    *,
    path: str,
    format: Literal["", "txt", "jsonl"] = "",
    size: Literal["row", "engine"] = "row",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read text prompts for image and video models from a text file, JSON lines, CSV or TSV.

    A JSON object or table row has a `prompt` (or `caption`). Other keys, and the keys of `metadata`, become
    columns of the prompt. Rewards compare with `target`. `id` names the prompt; by default its name is file
    and line number. `height` and `width` in pixels (and `num_frames`) set the size of the row's result.

    Args:
        path: The file.
        format: `txt` (one prompt a line) or `jsonl` (one object a line); by default from the file's suffix.
        size: Size of results. `row`: the row's own size, if it has one. `engine`: always the engine's size,
            for files whose columns `height` and `width` mean something else.
        bad_rows: Unusable rows, such as prompts too long for the model, raise (`error`) or are skipped and
            logged (`drop`).
        limit: Maximum number of prompts to read; 0: all.
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
        # Keys of the row override keys of its metadata.
        columns = {**({} if metadata is None else mapping(metadata, "metadata")), **row.all}
        message, asked = Message("user", (Part(text_of(row.columns, CAPTION)),)), sizes and row_size(columns)
        return Prompt(line_uid(row, source), (message,), columns.get("target"), columns=columns, size=asked)

    sizes = SIZE if size == "row" else None
    read = named_rows if as_json else text_lines
    rows = Rows(source, source.parent) if in_memory else read(source)
    reads = (CAPTION, "metadata", "target", *(sizes or ())) if as_json else ("line",)
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
    """Read prompts with recorded images, for imitation, comparison or ranking.

    A row has a `prompt` (or `caption`), and its images as `image` (a path), `images` (a list of paths), or
    `chosen` and `rejected`. `scores` is a list of one number per image, stored as its reward `score`, or maps
    reward names to such lists. By default a rejected image has the score 0, any other image the score 1. An
    error before training names all missing files.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder of the files; paths are relative to this folder and cannot leave it.
        height: Height in pixels to which images are resized, after a centre crop to this aspect ratio.
        width: Width in pixels; 0 for both keeps the images' own sizes.
        max_pixels: Maximum number of pixels of an image file.
        bad_rows: Unusable rows, and images of a size that the model does not support, raise (`error`) or are
            skipped and logged (`drop`).
        limit: Maximum number of rows to read; 0: all.
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
                paths = [row["chosen"], row["rejected"]]  # the default scores have this order, too
            case _:
                raise RowError(f"wanted one of `image`, `images`, or `chosen` and `rejected`, got {forms}")
        names = [text(name, f"path of image {i}") for i, name in enumerate(paths)]
        default = [1.0, 0.0] if len(forms) == 2 else [1.0] * len(names)
        return names, file_scores(row.get("scores", default), len(names))

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
    """Read prompts with recorded videos that are scored as a whole or by segment.

    A row has a `prompt` and `videos`, a list of paths. `scores` is a list of one number per video, stored as
    its reward `score`, or maps reward names to such lists. Each number can also be a list of numbers, one per
    segment of equal duration (DenseDPO, arXiv 2506.03517), for `diffusion.segment_preferences`. An error
    before training names all missing files.

    Args:
        path: File of rows, one JSON object a line.
        root: Folder of the files; paths are relative to this folder and cannot leave it.
        num_frames: Evenly spaced frames to take from each video.
        height: Height in pixels to which frames are scaled.
        width: Width in pixels to which frames are scaled.
        bad_rows: Unusable rows raise (`error`) or are skipped and logged (`drop`).
        limit: Maximum number of rows to read; 0: all.
    """

    def read(row: Mapping[str, Any]) -> tuple[list[str], Scores]:
        names = [text(name, f"videos[{i}]") for i, name in enumerate(listed(row.get("videos"), "videos"))]
        if not names:
            raise RowError("wanted at least one path in `videos`, got []")
        return names, file_scores(row.get("scores", [1.0] * len(names)), len(names), segments=True)

    def load(file: Path) -> Outcome:
        frames, times = load_video(file, num_frames, height, width)
        return Outcome(video=frames, times=times)

    size = lambda file: (num_frames, height, width)
    return recorded_prompts(Path(path), Path(root), limit, read, load, size, bad_rows, ("videos", "scores"))


def file_scores(values: Any, count: int, *, segments: bool = False) -> Scores:
    """Parse the scores of `count` files: a list of one value per file, or reward names mapped to lists.

    With `segments`, a value can be a list; its element k becomes the reward `name@k` of the file.
    """
    scores: list[dict[str, float]] = [{} for _ in range(count)]
    for name, column in (values if isinstance(values, Mapping) else {"score": values}).items():
        place = f"scores: {name}" if isinstance(values, Mapping) else "scores"
        for i, (score, value) in enumerate(zip(scores, listed(column, place, count), strict=True)):
            match value:
                case [] if segments:
                    raise RowError(
                        f"wanted a number, or a list of numbers by segment, as `{place}[{i}]`, got []"
                    )
                case [*parts] if segments:
                    score |= {f"{name}@{k}": number(x, f"{place}[{i}]") for k, x in enumerate(parts)}
                case _:
                    score[name] = number(value, f"{place}[{i}]")
    return tuple(scores)
