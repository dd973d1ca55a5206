"""Data sets of images to describe, with annotated contents: CHAIR, Object HalBench, closed vocabularies."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Frames, Media, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts, valid_rows
from mmrl.data.fields import listed, short, text, uid_of
from mmrl.data.media_root import MediaRoot, decode_image
from mmrl.vision.benchmarks.benchmark_files import FileError, attach_answers, read_answers, read_coco
from mmrl.vision.benchmarks.chair import Scene
from mmrl.vision.benchmarks.object_vocabulary import Ontology, read_ontology
from mmrl.vision.media.prompts import ask, root_of

DESCRIBE = "Describe this image."


@data
def chair(
    *,
    ontology: str,
    instances: tuple[str, ...],
    captions: tuple[str, ...] = (),
    images: str = "",
    root: str = "",
    answers: str = "",
    prompt: str = DESCRIBE,
    singular_by: str = "",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Create prompts that ask for captions of COCO images with known classes (CHAIR, arXiv 1809.02156).

    The classes of an image are read from its instance annotations and its reference captions.

    Args:
        ontology: CHAIR's list of synonyms (.txt), or JSON in the format of `read_ontology`.
        instances: COCO files of instance annotations.
        captions: COCO files of reference captions.
        images: File of rows with the `image_id` of the images to use; by default all images, or with
            `answers` the images that have an answer.
        root: Folder of the images; not needed with `answers`.
        answers: File of precomputed captions with image ids.
        prompt: The text of the prompt.
        singular_by: Function (`module:function`) for the singular of a noun, instead of the default.
        limit: Maximum number of images to use; 0: all images.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    coco = read_coco(instances, captions, words)
    precomputed = read_answers(Path(answers)) if answers else {}
    wanted = [str(row.columns.get("image_id")) for row in valid_rows(Path(images))] if images else [*coco]
    unknown = [uid for uid in [*wanted, *precomputed] if uid not in coco]
    if unknown:
        raise FileError(f"the instances contain {len(coco)} images, but not '{unknown[0]}'")
    wanted = [uid for uid in wanted if not precomputed or uid in precomputed][: limit or None]
    media = root_of(root, answers, "chair")

    def make(row: DataRow, number: int) -> Prompt:
        uid, file = row.place, coco[row.place].file
        medium = media.image(file, must_exist=not answers)
        target = Scene(frozenset(coco[uid].objects), words)
        return ask(uid, [medium], prompt, target, {"image_id": uid, "image": file})

    # Errors name the image id, because images are not rows of a file.
    prompts = read_prompts(instances[0], (DataRow(uid, "") for uid in wanted), make)
    return attach_answers(prompts, precomputed, answers, limit)


@data
def object_halbench(
    *,
    path: str,
    ontology: str,
    instances: tuple[str, ...],
    captions: tuple[str, ...] = (),
    root: str = "",
    answers: str = "",
    singular_by: str = "",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read the questions of Object HalBench, to be scored with rules (RLAIF-V, arXiv 2405.17220).

    Args:
        path: JSON lines with `image_id`, `question` and `image`, which is base64 as published, or a path if
            `root` is set. Without `image`, the file name in COCO is used.
        ontology: The refined list of synonyms (.txt), or JSON in the format of `read_ontology`.
        instances: COCO files of instance annotations.
        captions: COCO files of reference captions.
        root: Folder of the images, if `image` is a path.
        answers: File of precomputed answers with `image_id`.
        singular_by: Function (`module:function`) for the singular of a noun, instead of the default.
        limit: Maximum number of questions to read; 0: all questions.
    """
    words = read_ontology(Path(ontology), "refined", singular_by)
    coco = read_coco(instances, captions, words)
    precomputed = read_answers(Path(answers)) if answers else {}
    precomputed = {uid: answer.replace("Assistant:", "").strip() for uid, answer in precomputed.items()}
    media = MediaRoot(Path(root))

    def make(row: DataRow, number: int) -> Prompt:
        uid, question = uid_of(row.columns, "", "image_id"), text(row.columns.get("question"), "question")
        if uid not in coco:
            raise FileError(f"wanted a question and an image_id of the instances, got {short(uid)}")
        image = row.columns.get("image")
        if image is not None and not root:
            encoded = text(image, "image")
            # The base64 text serves as source: its hash identifies the image.
            medium = Media("image", uid, partial(_decode, encoded, row.place), encoded.encode())
        else:
            file = coco[uid].file if image is None else text(image, "image")
            medium = media.image(file, must_exist=not answers)
        columns = {key: value for key, value in row.all.items() if key != "image"}
        return ask(uid, [medium], question, Scene(frozenset(coco[uid].objects), words), columns)

    rows, reads = Rows(Path(path), media.root), ("image_id", "question", "image")
    prompts = read_prompts(path, rows, make, reads=reads, limit=limit)
    return attach_answers(prompts, precomputed, answers, limit)


@data
def closed_vocabulary(
    *,
    path: str,
    ontology: str,
    root: str = "",
    answers: str = "",
    prompt: str = DESCRIBE,
    singular_by: str = "",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Ask for descriptions of images whose objects are fully annotated with a closed vocabulary.

    Args:
        path: File of rows with `image`, `objects`, and optionally `absent` (objects that models tend to
            invent), reference `captions` whose objects count as present, an `id` and a `prompt`.
        ontology: JSON in the format of `read_ontology`, or a list of synonyms (.txt).
        root: Folder of the images; not needed with `answers`.
        answers: File of precomputed answers with ids.
        prompt: The prompt for rows without a column `prompt`.
        singular_by: Function (`module:function`) for the singular of a noun, instead of the default.
        limit: Maximum number of rows to read; 0: all rows.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    precomputed = read_answers(Path(answers)) if answers else {}
    media = root_of(root, answers, "closed_vocabulary")

    def make(row: DataRow, number: int) -> Prompt:
        target, image = _scene(row.columns, words), text(row.columns.get("image"), "image")
        medium, question = media.image(image, must_exist=not answers), row.columns.get("prompt")
        question = prompt if question is None else text(question, "prompt")
        return ask(uid_of(row.columns, image), [medium], question, target, row.all)

    rows, reads = Rows(Path(path), media.root), ("image", "objects", "absent", "captions", "prompt")
    prompts = read_prompts(path, rows, make, reads=reads, limit=limit)
    return attach_answers(prompts, precomputed, answers, limit)


def _scene(row: Mapping[str, Any], words: Ontology) -> Scene:
    if row.get("objects") is None:
        raise FileError(f"wanted image and objects, got {short(sorted(row))}")
    texts: dict[str, list[str]] = {}
    for name in ("objects", "absent", "captions"):
        values = [] if row.get(name) is None else listed(row[name], name)
        texts[name] = [text(value, f"{name}[{i}]") for i, value in enumerate(values)]
    try:
        objects, absent = ({words.name_of(word) for word in texts[name]} for name in ("objects", "absent"))
    except ValueError as error:
        raise FileError(f"wanted objects of the ontology: {error}") from error
    objects |= {mention.name for caption in texts["captions"] for mention in words.mentions(caption)}
    if objects & absent:
        raise FileError(f"{sorted(objects & absent)} cannot be both there and absent")
    return Scene(frozenset(objects), words, frozenset(absent))


def _decode(encoded: str, place: str) -> Frames:
    """Decode a base64 image; raise `FileError` if it is not base64."""
    try:
        return decode_image(base64.b64decode(encoded, validate=True), f"the image of {place}")
    except binascii.Error as error:
        raise FileError(f"{place}: `image` is no base64: {error}; give `root` if it is a path") from error
