"""Data set of boxes in images: referring expressions, screen elements, or objects to detect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data
from mmrl.core.types import Media, Message, Outcome, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import (
    RowError,
    fill_template,
    listed,
    mapping,
    number,
    short,
    template_fields,
    text,
    uid_of,
)  # fmt: skip
from mmrl.data.media import upright_size
from mmrl.data.media_root import MediaRoot
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import declared
from mmrl.data.video import FrameSampling
from mmrl.vision.benchmarks.boxes import NOWHERE, Box, Boxes, is_box, normal_label, parse_detections
from mmrl.vision.benchmarks.refcoco import refcoco_rows

ASK = (
    'Where is "{query}" in the image? Give its box as [left, top, right, bottom] in {units}, in the form '
    "<answer> [1, 2, 3, 4] </answer>."
)
READS = ("image", ("conversations", "query"), ("objects", "bbox"))
Coordinates = Literal["pixels", "thousandths", "shares", "resized"]
UNITS = {
    "pixels": "pixels",
    "thousandths": "thousandths of the image",
    "shares": "shares of the image",
    "resized": "pixels",
}


@data
def boxes(
    *,
    path: str,
    root: str = "",
    format: Literal["rows", "refcoco"] = "rows",
    instances: str = "",
    split: str = "",
    columns: Mapping[str, str] | None = None,
    prompt: str = ASK,
    demo: str = "",
    form: Literal["corners", "size"] = "corners",
    given: Literal["pixels", "thousandths", "shares"] = "pixels",
    coordinates: Coordinates = "pixels",
    patch: PositiveInt = 28,
    min_pixels: PositiveInt = 3136,
    max_pixels: PositiveInt = 12845056,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read images with target boxes: referring expressions, screen elements, or objects to detect.

    A row has `image`, a `query`, and `bbox` (four numbers) or `objects`, a list of `{"bbox_2d": [...],
    "label": "dog"}` that may be empty. A row of VLM-R1 (arXiv 2504.07615) has `conversations` instead: a
    question, and as the answer four numbers, a JSON list of objects, or None.

    Args:
        path: A file of jsonl, JSON or parquet, or a folder saved by `datasets`.
        root: Folder of the images; by default the folder of the rows.
        format: `rows` as above, or RefCOCO's published files (see `refcoco_rows`), one prompt per sentence.
        instances: For `refcoco`: COCO's `instances.json` with the boxes, if the rows have none.
        split: For `refcoco`: the split to read, such as testA; empty: all rows.
        columns: Maps the column names above to columns of the file; an empty name omits a column.
        prompt: Template of the prompt, with `{query}`, `{units}` or any other column.
        demo: Template of a demonstration, such as "<answer>{answer}</answer>"; empty: no demonstration.
        form: Boxes in rows: `corners` (left, top, right, bottom) or `size` (left, top, width, height).
        given: Unit of boxes in rows: `pixels`, or `thousandths` or `shares` (fractions) of the image size.
        coordinates: Unit of the boxes in answers, as for `given`; `thousandths` are those of Qwen2-VL and
            Qwen3-VL, `resized` pixels after resizing by Qwen2.5-VL's processor, which VLM-R1 converts back.
        patch: For `resized`: the sides are rounded to multiples of this number of pixels.
        min_pixels: For `resized`: minimum number of pixels, as set for the policy.
        max_pixels: For `resized`: maximum number of pixels, as set for the policy.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    media = MediaRoot.of_rows(source := Path(path), root)
    _check_format(format, instances or split, (form, given) != ("corners", "pixels"))

    def make(row: DataRow, number: int) -> Prompt:
        fields = row.renamed(columns)
        shown = media.reader(row.place, FrameSampling())("image", fields.get("image"), "image")
        query, pairs = _question_and_boxes(fields)
        unit, scale = (_unit(shown, by, patch, min_pixels, max_pixels) for by in (coordinates, given))
        truths = tuple(_box(box, form, name, scale) for box, _, name in pairs)
        target = Boxes(truths, tuple(label for _, label, _ in pairs), unit)
        words = {"query": query, "units": UNITS[coordinates]}
        return _prompt(row, number, fields, shown, target, words, prompt, demo)

    reads = declared((*READS, *template_fields(prompt, demo)), columns)
    rows = Rows(source, media.root) if format == "rows" else refcoco_rows(source, instances, split)
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)


def _check_format(format: str, selects: str, describes: bool) -> None:
    """Raise ValueError for an option that the chosen `format` does not read."""
    if format == "rows" and selects:
        raise ValueError("`instances` and `split` of `vision.boxes` are for `format: refcoco`")
    if format == "refcoco" and describes:
        raise ValueError("`format: refcoco` knows the layout of its boxes; leave out `form` and `given`")


def _prompt(
    row: DataRow,
    number: int,
    fields: Mapping[str, Any],
    shown: Media,
    target: Boxes,
    words: Mapping[str, str],
    template: str,
    demo: str,
) -> Prompt:
    """Make the prompt of a row from its columns, image and target boxes; `words` are more template fields."""
    words = {**row.others, **fields, **words}
    # The question of `conversations` is already the whole prompt, so apply no template.
    asked = fields.get("conversations") is not None
    question = words["query"] if asked else fill_template(template, words)
    messages = (Message("user", interleaved(question, [shown])),)
    answers = (Outcome(text=fill_template(demo, {**words, "answer": _answer(target)})),) if demo else ()
    kept = {key: value for key, value in {**row.others, **fields}.items() if key != "image"}
    return Prompt(uid_of(fields, f"{row.split}#{number}"), messages, target, answers, kept)


def _question_and_boxes(fields: Mapping[str, Any]) -> tuple[str, list[tuple[Any, str, str]]]:
    """Return a row's question, and its boxes as (box, label, name for errors)."""
    if fields.get("conversations") is not None:
        turns = listed(fields["conversations"], "conversations", 2)
        messages = [mapping(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
        if any(turn.get("from", who) != who for turn, who in zip(messages, ("human", "gpt"), strict=True)):
            raise RowError(f"wanted `conversations` of human and gpt, got {short(turns)}")
        if unread := sorted(key for turn in messages for key in turn if key not in ("from", "value")):
            raise RowError(f"nothing reads the key `{unread[0]}` of `conversations`; leave it out")
        question, answer = (turn.get("value") for turn in messages)
        return text(question, "conversations[0].value"), _published(answer)
    query = text(fields.get("query"), "query")
    if fields.get("objects") is None:
        return query, [(fields.get("bbox"), "", "bbox")]
    objects = []
    for i, item in enumerate(listed(fields["objects"], "objects")):
        name, entry = f"objects[{i}]", mapping(item, f"objects[{i}]")
        label = normal_label(text(entry.get("label"), f"{name}.label"))
        objects.append((entry.get("bbox_2d", entry.get("bbox")), label, name))
    return query, objects


def _published(answer: Any) -> list[tuple[Any, str, str]]:
    """Parse the boxes of VLM-R1's answers: four numbers, or a text that contains JSON."""
    name = "conversations[1].value"
    match answer:
        case str(words):
            objects = parse_detections(words)
            if objects is not None and NOWHERE not in objects:  # four bare numbers are parsed below
                return [(box, label, name) for box, label in objects]
            try:
                answer = json.loads(words.replace("<answer>", "").replace("</answer>", ""))
            except (ValueError, RecursionError) as error:
                wanted = "wanted four numbers, or a JSON list of objects with `bbox_2d` and `label`, as"
                raise RowError(f"{wanted} `{name}`, got {short(words)}") from error
    return [(answer, "", name)]


def _box(value: Any, form: str, name: str, scale: tuple[float, float]) -> Box:
    left, top, right, bottom = (number(edge, f"{name}[{i}]") for i, edge in enumerate(listed(value, name, 4)))
    box = (left, top, right, bottom) if form == "corners" else (left, top, left + right, top + bottom)
    if not is_box(box):
        wanted = "left < right and top < bottom" if form == "corners" else "a width and height above 0"
        raise RowError(f"wanted a box with {wanted} as `{name}`, got {short(value)}")
    if scale == (1.0, 1.0) and max(box) <= 1 and any(edge % 1 for edge in box):
        raise RowError(f"`{name}`, {short(value)}, lies inside of one pixel; for shares set `given: shares`")
    return Boxes((), unit=scale).in_pixels(box)


def _unit(
    image: Media, coordinates: str, patch: int, min_pixels: int, max_pixels: int
) -> tuple[float, float]:
    """Compute the pixels per unit of coordinates (horizontal, vertical); decodes only the image size."""
    if coordinates == "pixels":
        return 1.0, 1.0
    assert image.source is not None  # the image of a row always has a file or bytes
    width, height = upright_size(image.source, image.name)
    if coordinates == "resized":
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        rows, columns = smart_resize(height, width, patch, min_pixels, max_pixels)
        return width / columns, height / rows
    parts = 1000 if coordinates == "thousandths" else 1
    return width / parts, height / parts


def _answer(target: Boxes) -> str:
    """Format the boxes as an answer: a single box without a label, or a JSON list of objects."""
    written = []
    for box in map(target.in_answers, target.boxes):
        digits = None if max(box) > 1 else 3  # fractions need decimals
        written.append([round(edge, digits) for edge in box])
    if len(written) == 1 and not target.labels[0]:
        return json.dumps(written[0])
    pairs = zip(written, target.labels, strict=True)
    return json.dumps([{"bbox_2d": box, "label": label} for box, label in pairs])
