"""Data set of boxes in images: referring expressions, elements of a screen, objects to detect."""

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
)
from mmrl.data.media import upright_size
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import declared
from mmrl.vision.benchmarks.boxes import (
    NOWHERE,
    Box,
    Boxes,
    is_box,
    normal_label,
    parse_detections,
)
from mmrl.vision.media.media_root import MediaRoot, media_refs
from mmrl.vision.media.video import FrameSampling

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
    """Read images with boxes: expressions that refer to one, elements of a screen, or objects to detect.

    A row has `image`, a `query`, and `bbox` (four numbers) or `objects`, a list of
    `{"bbox_2d": [...], "label": "dog"}`, which may be empty. A row of VLM-R1 (arXiv 2504.07615) has
    `conversations` instead: a question, and as the answer four numbers, a JSON list of objects, or None. The
    target is what `vision.box_iou`, `vision.detection_map` and `vision.click_proximity` read.

    Args:
        path: jsonl, JSON, parquet or a folder of `datasets`.
        root: Folder of the images; by default that of the rows.
        columns: Maps these column names to those of the file; an empty name leaves a column out.
        prompt: Template of the prompt, with `{query}`, `{units}` or any other column.
        demo: Template of a demonstration, such as "<answer>{answer}</answer>"; empty for none.
        form: Whether four numbers of a row are left, top, right and bottom (`corners`), or left, top, width
            and height (`size`), as in COCO.
        given: What the numbers of rows count: `pixels`, or `thousandths` or `shares` of the image's size.
        coordinates: What answers are given in: `pixels` of the image; `thousandths` of its size, as by
            Qwen2-VL and Qwen3-VL; `shares` of its size; or `resized`, pixels of the image as the processor of
            Qwen2.5-VL resizes it, which VLM-R1 converts back.
        patch: For `resized`: the sides are multiples of this.
        min_pixels: For `resized`: fewest pixels, as for the policy.
        max_pixels: For `resized`: most pixels, as for the policy.
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most rows to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)

    def make(row: DataRow, number: int) -> Prompt:
        renamed = {ours: row.columns.get(theirs) for ours, theirs in (columns or {}).items()}
        fields = {**row.columns, **renamed}
        refs = list(media_refs(fields.get("image"), "image", "image"))
        if len(refs) != 1:
            raise RowError(f"wanted one image as `image`, got {short(fields.get('image'))}")
        shown = media.medium(refs[0], row.place, FrameSampling())
        query, found = _asked(fields)
        unit = (1.0, 1.0)
        if coordinates != "pixels":
            unit = _unit(_size_of(shown), coordinates, patch, min_pixels, max_pixels)
        scale = (
            (1.0, 1.0) if given == "pixels" else _unit(_size_of(shown), given, patch, min_pixels, max_pixels)
        )
        pairs = [(_box(box, form, name, scale), label) for box, label, name in found]
        target = Boxes(tuple(box for box, _ in pairs), tuple(label for _, label in pairs), unit)
        words = {**row.others, **fields, "query": query, "units": UNITS[coordinates]}
        # The question of a conversation is a whole prompt already.
        asked = query if fields.get("conversations") is not None else fill_template(prompt, words)
        messages = (Message("user", interleaved(asked, [shown])),)
        answers = (Outcome(text=fill_template(demo, {**words, "answer": _answer(target)})),) if demo else ()
        kept = {key: value for key, value in {**row.others, **fields}.items() if key != "image"}
        return Prompt(uid_of(fields, f"{row.split}#{number}"), messages, target, answers, kept)

    rows, reads = Rows(source, media.root), declared((*READS, *template_fields(prompt, demo)), columns)
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)


def _asked(fields: Mapping[str, Any]) -> tuple[str, list[tuple[Any, str, str]]]:
    """Read the question of a row and its boxes, each with its label and its name for errors."""
    if fields.get("conversations") is not None:
        turns = listed(fields["conversations"], "conversations", 2)
        said = [mapping(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
        if any(turn.get("from", who) != who for turn, who in zip(said, ("human", "gpt"), strict=True)):
            raise RowError(f"wanted `conversations` of human and gpt, got {short(turns)}")
        if unread := sorted(key for turn in said for key in turn if key not in ("from", "value")):
            raise RowError(f"nothing reads the key `{unread[0]}` of `conversations`; leave it out")
        asked, answered = (turn.get("value") for turn in said)
        return text(asked, "conversations[0].value"), _published(answered)
    query = text(fields.get("query"), "query")
    if fields.get("objects") is None:
        return query, [(fields.get("bbox"), "", "bbox")]
    found = []
    for i, item in enumerate(listed(fields["objects"], "objects")):
        entry = mapping(item, f"objects[{i}]")
        box = entry.get("bbox_2d", entry.get("bbox"))
        found.append((box, normal_label(text(entry.get("label"), f"objects[{i}].label")), f"objects[{i}]"))
    return query, found


def _published(answer: Any) -> list[tuple[Any, str, str]]:
    """Read the boxes of VLM-R1's answers: four numbers, or a text with JSON."""
    name = "conversations[1].value"
    match answer:
        case str(words):
            found = parse_detections(words)
            if found is not None and NOWHERE not in found:  # four bare numbers are no objects
                return [(box, label, name) for box, label in found]
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


def _size_of(medium: Media) -> tuple[int, int]:
    """Read the width and height of an image as the model sees it, without decoding the pixels."""
    assert medium.source is not None  # of a row's image it is a file or bytes
    return upright_size(medium.source, medium.name)


def _unit(
    size: tuple[int, int], coordinates: str, patch: int, min_pixels: int, max_pixels: int
) -> tuple[float, float]:
    """Compute the pixels per unit of answered coordinates, across and down."""
    width, height = size
    if coordinates == "resized":
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        rows, columns = smart_resize(height, width, patch, min_pixels, max_pixels)
        return width / columns, height / rows
    parts = 1000 if coordinates == "thousandths" else 1
    return width / parts, height / parts


def _answer(target: Boxes) -> str:
    """Write the boxes as an answer gives them: one box without a label, or a JSON list of objects."""
    written = [_rounded(target.in_answers(box)) for box in target.boxes]
    if len(written) == 1 and not target.labels[0]:
        return json.dumps(written[0])
    pairs = zip(written, target.labels, strict=True)
    return json.dumps([{"bbox_2d": box, "label": label} for box, label in pairs])


def _rounded(box: Sequence[float]) -> list[float]:
    """Round to whole numbers where that says enough, to thousandths in shares of the image."""
    return [round(edge) if max(box) > 1 else round(edge, 3) for edge in box]
