"""The published files of the benchmarks, read as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.data.dataset_io import SourceError, parse_json, read_text_file, valid_rows
from mmrl.data.fields import RowError, short
from mmrl.vision.benchmarks.object_vocabulary import Ontology

TEXTS = ("caption", "response", "text", "answer", "output")
IDS = ("image_id", "question_id", "id")


class FileError(RowError):
    """A file that does not have the form of its benchmark."""


@dataclass(frozen=True)
class Pictured:
    """What COCO says of a picture: its file, and the classes in it."""

    file: str
    objects: frozenset[str]


def read_json(path: Path, wanted: type[list] | type[dict]) -> Any:
    """Read a JSON file that holds a list or an object."""
    try:
        found = parse_json(read_text_file(path))
    except SourceError:
        raise
    except RowError as error:
        raise FileError(f"cannot read '{path}': {error}") from error
    if type(found) is not wanted:
        raise FileError(f"'{path}' must hold a JSON {wanted.__name__}, not {short(found)}")
    return found


def read_coco(instances: Sequence[str], captions: Sequence[str], ontology: Ontology) -> dict[str, Pictured]:
    """Collect the classes of every picture from instance annotations and from the reference captions, as
    CHAIR does."""
    files: dict[str, str] = {}
    objects: dict[str, set[str]] = {}
    for source in instances:
        raw = read_json(Path(source), dict)
        try:
            names = {one["id"]: ontology.name_of(one["name"]) for one in raw["categories"]}
            for one in raw["images"]:
                files[str(one["id"])] = one["file_name"]
                objects.setdefault(str(one["id"]), set())
            for one in raw["annotations"]:
                objects.setdefault(str(one["image_id"]), set()).add(names[one["category_id"]])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileError(
                f"'{source}' is no file of COCO instances: {type(error).__name__}: {error}"
            ) from error
    for source in captions:
        raw = read_json(Path(source), dict)
        try:
            for one in raw["annotations"]:
                if str(one["image_id"]) in objects:
                    said = ontology.mentions(one["caption"])
                    objects[str(one["image_id"])].update(mention.name for mention in said)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileError(
                f"'{source}' is no file of COCO captions: {type(error).__name__}: {error}"
            ) from error
    return {uid: Pictured(files.get(uid, ""), frozenset(found)) for uid, found in objects.items()}


def read_answers(path: Path) -> dict[str, str]:
    """Read ready-made answers by id: a caption file of CHAIR (`{"imgToEval": {id: {"image_id",
    "caption"}}}`), or a list or lines of objects with an id and a text."""
    found = _captions_of(path) or [(row.place, row.columns) for row in valid_rows(path)]
    answers: dict[str, str] = {}
    for place, row in found:
        row = row if isinstance(row, Mapping) else {}
        uid = next((str(row[key]) for key in IDS if key in row), None)
        text = next((row[key] for key in TEXTS if type(row.get(key)) is str), None)
        if uid is None or text is None:
            raise FileError(f"{place}: wanted one of {IDS} and one of {TEXTS}, got {sorted(row)}")
        if uid in answers:
            raise FileError(f"{place}: the id '{uid}' was answered before")
        answers[uid] = text
    return answers


def _captions_of(path: Path) -> list[tuple[str, Any]]:
    """Read a caption file of CHAIR; nothing if it is none, but JSON lines."""
    try:
        raw = parse_json(read_text_file(path))
    except RowError:
        return []  # whoever reads lines tells what is wrong with them
    found = raw.get("imgToEval") if type(raw) is dict else None
    return [(f"{path}: {key}", row) for key, row in found.items()] if type(found) is dict else []
