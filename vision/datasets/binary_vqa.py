"""Questions of yes or no about pictures: POPE and AMBER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts, read_text_file, valid_rows
from mmrl.data.fields import listed, mapping, short, text, uid_of
from mmrl.vision.benchmarks.amber import GENERATIVE, Described, Words
from mmrl.vision.benchmarks.benchmark_files import FileError, read_answers, read_json
from mmrl.vision.benchmarks.object_vocabulary import function_of
from mmrl.vision.media.media_root import MediaRoot
from mmrl.vision.media.prompts import ask, root_of, with_answers


@data
def pope(
    *, path: str, root: str = "", answers: str = "", prompt: str = "{text}", limit: NonNegativeInt = 0
) -> list[Prompt]:
    """Ask the questions of a file of POPE (arXiv 2305.10355): one object a line with `image`, `text` and
    `label`, yes or no.

    `answers` are lines with an `answer` in the same order, as its script wants them. `prompt` may add words
    to the question.
    """
    media = root_of(root, answers, "pope")

    def make(row: DataRow, number: int) -> Prompt:
        image, question = (text(row.columns.get(name), name) for name in ("image", "text"))
        label = row.columns.get("label")
        if label not in ("yes", "no"):
            raise FileError(f"the label must be yes or no, not {short(label)}")
        if not answers:
            media.locate(image)
        uid = uid_of(row.columns, str(number + 1), "question_id")
        return ask(uid, [media.image(image)], prompt.format(text=question), label, row.columns)

    prompts = read_prompts(path, Rows(Path(path), media.root), make, limit=limit)
    if answers:
        given = _first(valid_rows(Path(answers)), limit)
        prompts = with_answers(prompts, _in_order(prompts, given, answers), answers)
    return prompts


def _first(rows: Any, limit: int) -> list[DataRow]:
    return [row for number, row in enumerate(rows) if not limit or number < limit]


def _in_order(prompts: Sequence[Prompt], given: Sequence[DataRow], source: str) -> dict[str, str]:
    """Match answers with prompts by their order, and see that they are to the same questions."""
    if len(given) != len(prompts):
        raise FileError(f"'{source}' holds {len(given)} answers to {len(prompts)} questions")
    answers = {}
    for prompt, row in zip(prompts, given, strict=True):
        said = next((row.columns[key] for key in ("answer", "text") if key in row.columns), None)
        asked = row.columns.get("question", prompt.columns["text"])
        same = {one.strip().casefold() for one in (prompt.columns["text"], prompt.text)}
        if type(said) is not str or str(asked).strip().casefold() not in same:
            raise FileError(
                f"{row.place}: wanted an answer to {prompt.columns['text']!r}, got {short(said)} to "
                f"{short(asked)}; answers must stand in the order of the questions"
            )
        answers[prompt.uid] = said
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
    limit: NonNegativeInt = 0,
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

    def make(row: DataRow, number: int) -> Prompt:
        uid, (image, query) = row.columns.get("id"), (text(row.columns.get(n), n) for n in ("image", "query"))
        if type(uid) is not int or not 0 < uid <= len(known):
            raise FileError(f"wanted as `id` a number of 1 to {len(known)} annotations, got {short(uid)}")
        target = _target(mapping(known[uid - 1], f"annotation {uid}"), words)
        if not answers:
            media.locate(image)
        columns = {**row.columns, "type": known[uid - 1]["type"]}
        return ask(str(uid), [media.image(image)], prompt.format(query=query), target, columns)

    prompts = read_prompts(path, Rows(Path(path), media.root), make, limit=limit)
    if answers:
        asked = {one.uid for one in prompts}
        given = {uid: said for uid, said in given.items() if not limit or uid in asked}
        prompts = with_answers(prompts, given, answers)
    return prompts


def _words(relation: str, safe_words: str, nouns_by: str, similar_by: str) -> Words:
    safe = read_text_file(Path(safe_words)).split("\n") if safe_words else []
    chosen = {"nouns": nouns_by, "similar": similar_by}
    functions = {name: function_of(by) for name, by in chosen.items() if by}
    return Words(read_json(Path(relation), dict), frozenset(word for word in safe if word), **functions)


def _target(item: Mapping[str, Any], words: Words) -> Described | str:
    if item.get("type") == GENERATIVE:
        truth, invented = (
            tuple(text(word, name) for word in listed(item.get(name), name)) for name in ("truth", "hallu")
        )
        return Described(truth, invented, words)
    if item.get("truth") not in ("yes", "no"):
        raise FileError(f"the truth of an annotation is neither yes nor no: {short(item.get('truth'))}")
    text(item.get("type"), "type")
    return item["truth"]
