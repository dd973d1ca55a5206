"""Data sets of yes/no questions about images: POPE and AMBER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts, read_text_file, valid_rows
from mmrl.data.fields import listed, mapping, short, text, uid_of
from mmrl.vision.benchmarks.amber import GENERATIVE, AmberScene, Words
from mmrl.vision.benchmarks.benchmark_files import FileError, attach_answers, read_answers, read_json
from mmrl.vision.benchmarks.object_vocabulary import function_of
from mmrl.vision.media.prompts import ask, root_of, with_answers


@data
def pope(
    *, path: str, root: str = "", answers: str = "", prompt: str = "{text}", limit: NonNegativeInt = 0
) -> Sequence[Prompt]:
    """Read the yes/no questions of POPE (arXiv 2305.10355) about objects in images.

    Args:
        path: JSON lines with `image`, `text` and `label` (yes or no).
        root: Folder of the images; not needed with `answers`.
        answers: JSON lines with precomputed `answer`s in the order of the questions, as for POPE's script.
        prompt: Template of the prompt, with `{text}` for the question.
        limit: Maximum number of questions to read; 0: all questions.
    """
    media = root_of(root, answers, "pope")

    def make(row: DataRow, number: int) -> Prompt:
        image, question = (text(row.columns.get(name), name) for name in ("image", "text"))
        label = row.columns.get("label")
        if label not in ("yes", "no"):
            raise FileError(f"the label must be yes or no, not {short(label)}")
        uid = uid_of(row.columns, str(number + 1), "question_id")
        medium = media.image(image, must_exist=not answers)  # scoring recorded answers needs no images
        return ask(uid, [medium], prompt.format(text=question), label, row.all)

    reads = ("image", "text", "label", "question_id")
    prompts = read_prompts(path, Rows(Path(path), media.root), make, reads=reads, limit=limit)
    if not answers:
        return prompts
    rows = [*islice(valid_rows(Path(answers)), limit or None)]
    return with_answers(prompts, _in_order(prompts, rows, answers), answers)


def _in_order(prompts: Sequence[Prompt], rows: Sequence[DataRow], source: str) -> dict[str, str]:
    """Match answers to prompts by position, and check that each row repeats the question of its prompt."""
    if len(rows) != len(prompts):
        raise FileError(f"'{source}' holds {len(rows)} answers to {len(prompts)} questions")
    answers = {}
    for prompt, row in zip(prompts, rows, strict=True):
        answer = next((row.columns[key] for key in ("answer", "text") if key in row.columns), None)
        question = row.columns.get("question", prompt.columns["text"])
        # Answer files repeat either the question or the whole prompt.
        same = {wording.strip().casefold() for wording in (prompt.columns["text"], prompt.text)}
        if type(answer) is not str or str(question).strip().casefold() not in same:
            raise FileError(
                f"{row.place}: wanted an answer to {prompt.columns['text']!r}, got {short(answer)} to "
                f"{short(question)}; answers must be in the order of the questions"
            )
        answers[prompt.uid] = answer
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
) -> Sequence[Prompt]:
    """Read the queries of AMBER (arXiv 2311.07397): requests for descriptions, and yes/no questions.

    Args:
        path: One of AMBER's files `query_*.json`.
        annotations: AMBER's `annotations.json`.
        relation: AMBER's file of associated words.
        safe_words: AMBER's file of words that never count as hallucinated.
        root: Folder of the images; not needed with `answers`.
        answers: File of precomputed answers with ids.
        prompt: Template of the prompt, with `{query}` for the query.
        nouns_by: Function (`module:function`) that returns the nouns of a text, instead of the default.
        similar_by: Function that decides whether two words have about the same meaning. Without a function,
            this step of AMBER's matching is skipped.
        limit: Maximum number of queries to read; 0: all queries.
    """
    scenes = read_json(Path(annotations), list)
    safe = read_text_file(Path(safe_words)).split("\n") if safe_words else []
    options = {"nouns": nouns_by, "similar": similar_by}
    functions = {name: function_of(by) for name, by in options.items() if by}
    # Drop the empty string after a final line break.
    words = Words(read_json(Path(relation), dict), frozenset(safe) - {""}, **functions)
    precomputed = read_answers(Path(answers)) if answers else {}
    media = root_of(root, answers, "amber")

    def make(row: DataRow, number: int) -> Prompt:
        uid, (image, query) = row.columns.get("id"), (text(row.columns.get(n), n) for n in ("image", "query"))
        if type(uid) is not int or not 0 < uid <= len(scenes):
            raise FileError(f"wanted as `id` a number of 1 to {len(scenes)} annotations, got {short(uid)}")
        target = _target(mapping(scenes[uid - 1], f"annotation {uid}"), words)  # ids count from 1
        medium = media.image(image, must_exist=not answers)
        columns = {**row.all, "type": scenes[uid - 1]["type"]}
        return ask(str(uid), [medium], prompt.format(query=query), target, columns)

    rows = Rows(Path(path), media.root)
    prompts = read_prompts(path, rows, make, reads=("image", "query"), limit=limit)
    return attach_answers(prompts, precomputed, answers, limit)


def _target(item: Mapping[str, Any], words: Words) -> AmberScene | str:
    if item.get("type") == GENERATIVE:
        truth, absent = (
            tuple(text(word, name) for word in listed(item.get(name), name)) for name in ("truth", "hallu")
        )
        return AmberScene(truth, absent, words)
    if item.get("truth") not in ("yes", "no"):
        raise FileError(f"the truth of an annotation is neither yes nor no: {short(item.get('truth'))}")
    text(item.get("type"), "type")
    return item["truth"]
