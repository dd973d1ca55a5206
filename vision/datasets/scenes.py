"""Pictures to describe, with what is known to be in them: CHAIR, Object HalBench, and sets of our own."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmrl.registry import data
from mmrl.rows import sound_rows
from mmrl.types import Frames, Media, Prompt
from mmrl.vision.asking import ask, distinct, require, root_of, with_answers
from mmrl.vision.hallucination.files import FileError, read_answers, read_coco
from mmrl.vision.hallucination.ontology import Ontology, read_ontology
from mmrl.vision.hallucination.scenes import Scene
from mmrl.vision.media import MediaRoot, decode_image

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
    limit: int = 0,
) -> list[Prompt]:
    """Ask for a caption of COCO pictures, with the classes that their instances and reference captions name
    (CHAIR, arXiv 1809.02156).

    `images` is a file of rows with `image_id` that says which pictures to take; without it all are taken, or
    those that `answers` holds captions of. `ontology` is CHAIR's list of synonyms, or our JSON.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    known = read_coco(instances, captions, words)
    given = read_answers(Path(answers)) if answers else {}
    wanted = [str(row.columns.get("image_id")) for row in sound_rows(Path(images))] if images else [*known]
    unknown = [uid for uid in [*wanted, *given] if uid not in known]
    if unknown:
        raise FileError(f"the instances know {len(known)} pictures, but not '{unknown[0]}'")
    wanted = [uid for uid in wanted if not given or uid in given][: limit or None]
    media = root_of(root, answers, "chair")
    if not answers:
        require(media, ((uid, known[uid].file) for uid in wanted), instances[0])
    prompts = [
        ask(
            uid,
            [media.image(known[uid].file)],
            prompt,
            Scene(known[uid].objects, words),
            {"image_id": uid, "image": known[uid].file},
        )
        for uid in wanted
    ]
    return _finished(prompts, given, answers, limit, instances[0])


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
    limit: int = 0,
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
    prompts, named = [], []
    for row in sound_rows(Path(path)):
        uid, question = str(row.columns.get("image_id")), row.columns.get("question")
        if uid not in known or type(question) is not str:
            raise FileError(
                f"{row.place}: wanted a question and an image_id that the instances know, got '{uid}'"
            )
        shown = row.columns.get("image") or known[uid].file
        if row.columns.get("image") and not root:
            medium = Media("image", uid, _encoded(shown, row.place))
        else:
            named.append((row.place, shown))
            medium = media.image(shown)
        target = Scene(known[uid].objects, words)
        columns = {key: value for key, value in row.columns.items() if key != "image"}
        prompts.append(ask(uid, [medium], question, target, columns))
        if len(prompts) == limit:
            break
    if not answers:
        require(media, named, path)
    return _finished(prompts, given, answers, limit, path)


@data
def closed_set(
    *,
    path: str,
    ontology: str,
    root: str = "",
    answers: str = "",
    prompt: str = DESCRIBE,
    singular_by: str = "",
    limit: int = 0,
) -> list[Prompt]:
    """Ask for a description of pictures of which a closed vocabulary says all that is in them.

    A row holds `image`, `objects`, and if there are any `absent` (what might be expected, but is not there),
    reference `captions`, whose mentions count as there, an `id` and a `prompt` of its own. `ontology` is our
    JSON or a list of synonyms.
    """
    words = read_ontology(Path(ontology), singular_by=singular_by)
    given = read_answers(Path(answers)) if answers else {}
    media = root_of(root, answers, "closed_set")
    prompts, named = [], []
    for row in sound_rows(Path(path)):
        image, target = _scene(row.columns, words, row.place)
        uid = str(row.columns.get("id", image))
        named.append((row.place, image))
        prompts.append(ask(uid, [media.image(image)], row.columns.get("prompt", prompt), target, row.columns))
        if len(prompts) == limit:
            break
    if not answers:
        require(media, named, path)
    return _finished(prompts, given, answers, limit, path)


def _scene(row: Mapping[str, Any], words: Ontology, place: str) -> tuple[str, Scene]:
    try:
        objects = {words.name_of(one) for one in row["objects"]}
        for caption in row.get("captions", ()):
            objects |= {mention.name for mention in words.mentions(caption)}
        absent = {words.name_of(one) for one in row.get("absent", ())}
        image = row["image"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"{place}: wanted image and objects: {type(error).__name__}: {error}") from error
    if objects & absent:
        raise FileError(f"{place}: {sorted(objects & absent)} cannot be both there and absent")
    return image, Scene(frozenset(objects), words, frozenset(absent))


def _encoded(text: str, place: str) -> Callable[[], Frames]:
    def load() -> Frames:
        try:
            return decode_image(base64.b64decode(text, validate=True), f"the picture of {place}")
        except binascii.Error as error:
            raise FileError(f"{place}: `image` is no base64: {error}; give `root` if it is a path") from error

    return load


def _finished(
    prompts: list[Prompt], given: dict[str, str], answers: str, limit: int, source: str
) -> list[Prompt]:
    if answers:
        # With a limit, answers to what lies behind it are no mistake.
        asked = {prompt.uid for prompt in prompts}
        given = {uid: text for uid, text in given.items() if not limit or uid in asked}
        prompts = with_answers(prompts, given, answers)
    return distinct(prompts, source)
