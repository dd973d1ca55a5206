"""Readers of published benchmark files: COCO annotations and answer files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.core.types import Prompt
from mmrl.data.dataset_io import parse_json, read_text_file, valid_rows
from mmrl.data.fields import RowError, mapping, short
from mmrl.vision.benchmarks.object_vocabulary import Ontology
from mmrl.vision.media.prompts import with_answers

TEXTS = ("caption", "response", "text", "answer", "output")
IDS = ("image_id", "question_id", "id")


class FileError(RowError):
    """Raised for a file that does not have the format of its benchmark."""


@dataclass
class CocoImage:
    """A COCO image: its file name, and the object classes in its annotations."""

    file: str = ""
    objects: set[str] = field(default_factory=set)


def read_json(path: Path, wanted: type[list] | type[dict]) -> Any:
    """Read a JSON file and check that its value is of the type `wanted`: a list or an object."""
    source = read_text_file(path)
    try:
        value = parse_json(source)
    except RowError as error:
        raise FileError(f"cannot read '{path}': {error}") from error
    if type(value) is not wanted:
        raise FileError(f"'{path}' must hold a JSON {wanted.__name__}, not {short(value)}")
    return value


def read_coco(instances: Sequence[str], captions: Sequence[str], ontology: Ontology) -> dict[str, CocoImage]:
    """Collect the object classes of every image from COCO instances and reference captions, as CHAIR does."""
    images: dict[str, CocoImage] = {}
    for i, source in enumerate((*instances, *captions)):  # captions last: they add to images with instances
        raw, form = read_json(Path(source), dict), "instances" if i < len(instances) else "captions"
        try:
            if form == "instances":
                names = {row["id"]: ontology.name_of(row["name"]) for row in raw["categories"]}
                for row in raw["images"]:
                    # Convert ids to strings: COCO uses integers, but answer files may contain strings.
                    images.setdefault(str(row["id"]), CocoImage()).file = row["file_name"]
            for row in raw["annotations"]:
                image = images.get(str(row["image_id"]))  # None for a caption of an image without instances
                if form == "instances":
                    image = images.setdefault(str(row["image_id"]), CocoImage())
                    image.objects.add(names[row["category_id"]])
                elif image is not None:
                    image.objects.update(mention.name for mention in ontology.mentions(row["caption"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileError(
                f"'{source}' is no file of COCO {form}: {type(error).__name__}: {error}"
            ) from error
    return images


def read_answers(path: Path) -> dict[str, str]:
    """Read a file of precomputed answers; maps ids to answers.

    The file is a caption file of CHAIR (`{"imgToEval": {id: {"image_id", "caption"}}}`), a JSON list of
    objects, or JSON lines. Each object has an id and a text.
    """
    try:
        raw = parse_json(read_text_file(path))
    except RowError:
        raw = None  # JSON lines or a damaged file: `valid_rows` below reports the faulty line
    match raw:
        case {"imgToEval": {**captions}} if captions:
            rows = [(f"{path}: {key}", row) for key, row in captions.items()]
        case _:
            rows = [(row.place, row.columns) for row in valid_rows(path)]
    answers: dict[str, str] = {}
    for place, row in rows:
        row = mapping(row, place)
        uid = next((str(row[key]) for key in IDS if key in row), None)
        text = next((row[key] for key in TEXTS if type(row.get(key)) is str), None)
        if uid is None or text is None:
            raise FileError(f"{place}: wanted one of {IDS} and one of {TEXTS}, got {sorted(row)}")
        if uid in answers:
            raise FileError(f"{place}: the id '{uid}' was answered before")
        answers[uid] = text
    return answers


def attach_answers(
    prompts: Sequence[Prompt], answers: Mapping[str, str], source: str, limit: int
) -> Sequence[Prompt]:
    """Attach precomputed answers from the file `source` to prompts; without a file, change nothing."""
    if not source:
        return prompts
    # An answer without a prompt is an error, unless `limit` is set and may have left its prompt out.
    uids = {prompt.uid for prompt in prompts}
    return with_answers(prompts, {uid: a for uid, a in answers.items() if not limit or uid in uids}, source)
