"""Questions of yes or no about pictures: POPE and AMBER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.registry import data
from mmrl.rows import DataRow, sound_rows
from mmrl.types import Prompt
from mmrl.vision.asking import ask, distinct, require, root_of, with_answers
from mmrl.vision.hallucination.amber import GENERATIVE, Described, Words
from mmrl.vision.hallucination.files import FileError, read_answers, read_json
from mmrl.vision.hallucination.ontology import function_of
from mmrl.vision.media import MediaRoot


@data
def pope(
    *, path: str, root: str = "", answers: str = "", prompt: str = "{text}", limit: int = 0
) -> list[Prompt]:
    """Ask the questions of a file of POPE (arXiv 2305.10355): one object a line with `image`, `text` and
    `label`, yes or no.

    `answers` are lines with an `answer` in the same order, as its script wants them. `prompt` may add words
    to the question.
    """
    rows = _first(sound_rows(Path(path)), limit)
    media = root_of(root, answers, "pope")
    prompts = []
    for number, row in enumerate(rows, 1):
        try:
            image, text, label = (row.columns[key] for key in ("image", "text", "label"))
        except KeyError as error:
            raise FileError(f"{row.place}: wanted image, text and label, but there is no {error}") from error
        if label not in ("yes", "no"):
            raise FileError(f"{row.place}: the label must be yes or no, not {label!r}")
        uid = str(row.columns.get("question_id", number))
        prompts.append(ask(uid, [media.image(image)], prompt.format(text=text), label, row.columns))
    if answers:
        given = _first(sound_rows(Path(answers)), limit)
        prompts = with_answers(prompts, _in_order(prompts, given, answers), answers)
    else:
        require(media, ((row.place, row.columns["image"]) for row in rows), path)
    return distinct(prompts, path)


def _first(rows: Any, limit: int) -> list[DataRow]:
    return [row for number, row in enumerate(rows) if not limit or number < limit]


def _in_order(prompts: Sequence[Prompt], given: Sequence[DataRow], source: str) -> dict[str, str]:
    """Match answers with prompts by their order, and see that they are to the same questions."""
    if len(given) != len(prompts):
        raise FileError(f"'{source}' holds {len(given)} answers to {len(prompts)} questions")
    answers = {}
    for prompt, row in zip(prompts, given, strict=True):
        text = next((row.columns[key] for key in ("answer", "text") if key in row.columns), None)
        asked = row.columns.get("question", prompt.columns["text"])
        same = {one.strip().casefold() for one in (prompt.columns["text"], prompt.text)}
        if type(text) is not str or str(asked).strip().casefold() not in same:
            raise FileError(
                f"{row.place}: wanted an answer to {prompt.columns['text']!r}, got {text!r} to {asked!r}; "
                "answers must stand in the order of the questions"
            )
        answers[prompt.uid] = text
    return answers


@data
def amber(
    *,
    path: str,
    annotations: str,
    relation: str,
    safe_words: str = "",
    root: str = "",
    answers: str = "",
    prompt: str = "{query}",
    nouns_by: str = "",
    similar_by: str = "",
    limit: int = 0,
) -> list[Prompt]:
    """Ask the queries of AMBER (arXiv 2311.07397), to describe or of yes or no; `path` is one of its files
    `query_*.json`.

    `relation` holds its associated words, `safe_words` those never counted. `nouns_by` and `similar_by` name
    other functions (`module:function`) that find the nouns of a text, and tell words of about the same
    meaning (two texts to true or false); the second step is left out without one.
    """
    known = read_json(Path(annotations), list)
    words = _words(relation, safe_words, nouns_by, similar_by)
    given = read_answers(Path(answers)) if answers else {}
    media: MediaRoot = root_of(root, answers, "amber")
    prompts, named = [], []
    for row in _first(sound_rows(Path(path)), limit):
        try:
            uid, image, text = row.columns["id"], row.columns["image"], row.columns["query"]
            item = known[uid - 1] if uid > 0 else None
            target = _target(item, words)
        except (KeyError, IndexError, TypeError) as error:
            raise FileError(
                f"{row.place}: wanted id, image and query, and an annotation of that id: "
                f"{type(error).__name__}: {error}"
            ) from error
        named.append((row.place, image))
        columns = {**row.columns, "type": item["type"]}
        prompts.append(ask(str(uid), [media.image(image)], prompt.format(query=text), target, columns))
    if answers:
        asked = {one.uid for one in prompts}
        given = {uid: text for uid, text in given.items() if not limit or uid in asked}
        prompts = with_answers(prompts, given, answers)
    else:
        require(media, named, path)
    return distinct(prompts, path)


def _words(relation: str, safe_words: str, nouns_by: str, similar_by: str) -> Words:
    safe = Path(safe_words).read_text(encoding="utf-8").split("\n") if safe_words else []
    chosen = {"nouns": nouns_by, "similar": similar_by}
    functions = {name: function_of(by) for name, by in chosen.items() if by}
    return Words(read_json(Path(relation), dict), frozenset(word for word in safe if word), **functions)


def _target(item: Mapping[str, Any], words: Words) -> Described | str:
    if item["type"] == GENERATIVE:
        return Described(tuple(item["truth"]), tuple(item["hallu"]), words)
    if item["truth"] not in ("yes", "no"):
        raise KeyError(f"truth {item['truth']!r} is neither yes nor no")
    return item["truth"]
