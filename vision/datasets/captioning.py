"""Pictures to describe, with what is known to be in them: CHAIR, Object HalBench, and sets of our own."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Frames, Media, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts, valid_rows
from mmrl.data.fields import listed, short, text, uid_of
from mmrl.vision.benchmarks.benchmark_files import FileError, read_answers, read_coco
from mmrl.vision.benchmarks.chair import Scene
from mmrl.vision.benchmarks.object_vocabulary import Ontology, read_ontology
from mmrl.vision.media.media_root import MediaRoot, decode_image
from mmrl.vision.media.prompts import ask, root_of, with_answers

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
) -> list[Prompt]:
    """Ask for a caption of COCO pictures, with the classes that their instances and reference captions name
    (CHAIR, arXiv 1809.02156).

    `images` is a file of rows with `image_id` that says which pictures to take; without it all are taken, or
    those that `answers` holds captions of. `ontology` is CHAIR's list of synonyms, or our JSON.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    known = read_coco(instances, captions, words)
    given = read_answers(Path(answers)) if answers else {}
    wanted = [str(row.columns.get("image_id")) for row in valid_rows(Path(images))] if images else [*known]
    unknown = [uid for uid in [*wanted, *given] if uid not in known]
    if unknown:
        raise FileError(f"the instances know {len(known)} pictures, but not '{unknown[0]}'")
    wanted = [uid for uid in wanted if not given or uid in given][: limit or None]
    media = root_of(root, answers, "chair")

    def make(row: DataRow, number: int) -> Prompt:
        uid, file = row.place, known[row.place].file
        if not answers:
            media.locate(file)
        target = Scene(known[uid].objects, words)
        return ask(uid, [media.image(file)], prompt, target, {"image_id": uid, "image": file})

    prompts = read_prompts(instances[0], (DataRow(uid, "") for uid in wanted), make)
    return _answered(prompts, given, answers, limit)


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
) -> list[Prompt]:
    """Ask the questions of Object HalBench, one object a line with `image_id`, `question` and `image`, scored
    by rules (RLAIF-V, arXiv 2405.17220).

    `image` is the picture in base64, as published, or with `root` a path; without it the file that COCO names
    is taken. `ontology` is the refined list of synonyms, or our JSON. `answers` are rows with `image_id`.
    """
    words = read_ontology(Path(ontology), "refined", singular_by)
    known = read_coco(instances, captions, words)
    given = read_answers(Path(answers)) if answers else {}
    given = {uid: text.replace("Assistant:", "").strip() for uid, text in given.items()}
    media = MediaRoot(Path(root))

    def make(row: DataRow, number: int) -> Prompt:
        uid, question = uid_of(row.columns, "", "image_id"), text(row.columns.get("question"), "question")
        if uid not in known:
            raise FileError(f"wanted a question and an image_id that the instances know, got {short(uid)}")
        shown = row.columns.get("image")
        shown = known[uid].file if shown is None else text(shown, "image")
        if row.columns.get("image") is not None and not root:
            medium = Media("image", uid, _encoded(shown, row.place), shown.encode())
        else:
            medium = media.image(shown)
            if not answers:
                media.locate(shown)
        columns = {key: value for key, value in row.columns.items() if key != "image"}
        return ask(uid, [medium], question, Scene(known[uid].objects, words), columns)

    prompts = read_prompts(path, Rows(Path(path), media.root), make, limit=limit)
    return _answered(prompts, given, answers, limit)


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
) -> list[Prompt]:
    """Ask for a description of pictures of which a closed vocabulary says all that is in them.

    A row holds `image`, `objects`, and if there are any `absent` (what might be expected, but is not there),
    reference `captions`, whose mentions count as there, an `id` and a `prompt` of its own. `ontology` is our
    JSON or a list of synonyms.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    given = read_answers(Path(answers)) if answers else {}
    media = root_of(root, answers, "closed_vocabulary")

    def make(row: DataRow, number: int) -> Prompt:
        image, target = _scene(row.columns, words)
        if not answers:
            media.locate(image)
        asked = row.columns.get("prompt")
        asked = prompt if asked is None else text(asked, "prompt")
        return ask(uid_of(row.columns, image), [media.image(image)], asked, target, row.columns)

    prompts = read_prompts(path, Rows(Path(path), media.root), make, limit=limit)
    return _answered(prompts, given, answers, limit)


def _scene(row: Mapping[str, Any], words: Ontology) -> tuple[str, Scene]:
    texts = {name: _texts(row.get(name), name) for name in ("objects", "absent", "captions")}
    if row.get("objects") is None:
        raise FileError(f"wanted image and objects, got {short(sorted(row))}")
    try:
        objects, absent = ({words.name_of(one) for one in texts[name]} for name in ("objects", "absent"))
    except (KeyError, ValueError) as error:
        raise FileError(f"wanted objects of the ontology: {type(error).__name__}: {error}") from error
    objects |= {mention.name for caption in texts["captions"] for mention in words.mentions(caption)}
    if objects & absent:
        raise FileError(f"{sorted(objects & absent)} cannot be both there and absent")
    return text(row.get("image"), "image"), Scene(frozenset(objects), words, frozenset(absent))


def _texts(value: Any, name: str) -> list[str]:
    return [] if value is None else [text(one, f"{name}[{i}]") for i, one in enumerate(listed(value, name))]


def _encoded(text: str, place: str) -> Callable[[], Frames]:
    def load() -> Frames:
        try:
            return decode_image(base64.b64decode(text, validate=True), f"the picture of {place}")
        except binascii.Error as error:
            raise FileError(f"{place}: `image` is no base64: {error}; give `root` if it is a path") from error

    return load


def _answered(prompts: list[Prompt], given: dict[str, str], answers: str, limit: int) -> list[Prompt]:
    if not answers:
        return prompts
    # With a limit, answers to what comes after it are no mistake.
    asked = {prompt.uid for prompt in prompts}
    given = {uid: said for uid, said in given.items() if not limit or uid in asked}
    return with_answers(prompts, given, answers)
