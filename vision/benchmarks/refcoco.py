"""Reader of referring expressions in the published files of RefCOCO, RefCOCO+ and RefCOCOg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import DataRow, Rows, SourceError
from mmrl.data.fields import RowError, listed, mapping, number, text
from mmrl.vision.benchmarks.benchmark_files import FileError, read_json

Columns = Mapping[str, Any]
Boxes = Mapping[int, tuple[str, Any]]  # maps an annotation id to (image file, (left, top, width, height))


def refcoco_rows(path: Path, instances: str = "", split: str = "") -> Iterator[DataRow]:
    """Read one row per referring expression: `image`, `query` and `bbox` (left, top, right, bottom).

    Three layouts are known. JSON refs have `sentences`, `ann_id` and `image_id`; their boxes come from COCO's
    `instances`. Parquet files of the hub have a list of expressions as `answer`, and boxes (left, top, width,
    height). Rows of Qwen-VL have one expression as `sent`, and boxes (left, top, right, bottom). `split`
    selects the rows of one split.
    """
    if path.suffix in (".p", ".pkl", ".pickle"):
        raise SourceError(f"'{path}' is a pickle, which can run code and is never read; convert it to JSON")
    boxes = _boxes_of(Path(instances)) if instances else {}
    for row in Rows(path, path.parent):
        if split and row.split != split and not row.fault:
            continue
        try:
            found = [] if row.fault else _expressions(row.columns, boxes)
        except RowError as error:
            row, found = replace(row, fault=str(error)), []
        if row.fault:
            yield row
        for i, columns in enumerate(found):
            place = row.place if len(found) == 1 else f"{row.place}#{i}"
            # Leave out the position in the file: one line of the file can become several rows.
            yield DataRow(place, row.split, columns)


def _expressions(columns: Columns, boxes: Boxes) -> list[dict[str, Any]]:
    """Split a published row into one row per expression; other columns are copied."""
    if columns.get("sent") is not None:
        rest = {name: value for name, value in columns.items() if name != "sent"}
        return [{**rest, "query": columns["sent"]}]
    rest = {name: value for name, value in columns.items() if name not in ("sentences", "answer", "split")}
    if columns.get("sentences") is not None:
        key = columns.get("ann_id")
        if not boxes or key not in boxes:
            missing = f"the instances have no annotation {key}"
            raise RowError(missing if boxes else "set `instances`, the file of its box")
        sentences = [mapping(one, "sentences") for one in listed(columns["sentences"], "sentences")]
        queries = [(text(one.get("sent"), "sent"), f"{one.get('sent_id')}") for one in sentences]
        rest["image"], box = boxes[rest.pop("ann_id")]
    elif columns.get("answer") is not None:
        texts, box = listed(columns["answer"], "answer"), columns.get("bbox")
        queries = [(text(one, "answer"), f"{columns.get('question_id')}#{i}") for i, one in enumerate(texts)]
    else:
        raise RowError("wanted `sentences`, `answer` or `sent` with the expressions of a box")
    left, top, width, height = (number(edge, "bbox") for edge in listed(box, "bbox", 4))
    corners = [left, top, left + width, top + height]
    return [{**rest, "id": uid, "query": query, "bbox": corners} for query, uid in queries]


def _boxes_of(path: Path) -> Boxes:
    raw = read_json(path, dict)
    try:
        files = {image["id"]: image["file_name"] for image in raw["images"]}
        return {entry["id"]: (files[entry["image_id"]], entry["bbox"]) for entry in raw["annotations"]}
    except (KeyError, TypeError) as error:
        raise FileError(f"'{path}' is no file of COCO instances: {type(error).__name__}: {error}") from error
