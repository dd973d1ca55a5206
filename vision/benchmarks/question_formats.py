"""Published file formats of question benchmarks, each as one entry of the table `FORMATS`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from mmrl.data.dataset_io import DataRow, Rows
from mmrl.data.fields import RowError, listed, mapping, number, short, text
from mmrl.data.row_fields import Column, has_content
from mmrl.vision.benchmarks.answer_rules import Benchmark
from mmrl.vision.media.prompts import answer_of

Columns = Mapping[str, Any]
ROTATION = 1_000_000  # offset of MMBench's `index` between rotations of a question
IMAGES = range(1, 8)  # MMMU's image columns are numbered from 1 to 7
# Folders in MVBench's video archives, with the tasks that use them.
FOLDERS = {
    "star/Charades_v1_480": "action_sequence action_prediction object_interaction",
    "ssv2_video": "action_antonym",
    "Moments_in_Time_Raw/videos": "fine_grained_action",
    "FunQA_test/test": "unexpected_action",
    "clevrer/video_validation": "object_existence moving_direction moving_count moving_attribute "
    "counterfactual_inference",
    "perception/videos": "object_shuffle action_count state_change character_order",
    "sta/sta_video": "action_localization",
    "scene_qa/video": "scene_transition",
    "nturgbd": "fine_grained_pose",
    "vlnqa": "egocentric_navigation",
    "tvqa/frames_fps3_hq": "episodic_reasoning",
}
FOLDER_OF = {task: folder for folder, tasks in FOLDERS.items() for task in tasks.split()}


@dataclass(frozen=True)
class Item:
    """One question of a benchmark.

    Args:
        uid: Unique id.
        question: The text of the question.
        answers: Right answers; empty if the row has no published answer.
        choices: Texts of the choices A, B, ...; empty for an open question.
        media: (kind, value in the row, placeholder in the text); placeholder "": show it before the question.
        named: Columns for the scoring rules, and for the option `where` of rewards.
        cluster: Name shared by dependent rows: rotations of a question, or questions about one video.
        image_of: The id of the earlier row whose image this row shows.
        bounds: First and last second of the video to show.
    """

    uid: str
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    media: tuple[tuple[str, Any, str], ...] = ()
    named: Columns = field(default_factory=dict)
    cluster: str = ""
    image_of: str = ""
    bounds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Format:
    """A benchmark's file format and prompt templates.

    `needs` are the columns that every row must have, `reads` all columns that `parse` reads. `prompt` and
    `open_prompt` (for questions without choices) are templates with `{question}`, `{choices}`, `{hint}` and
    `{subtitles}`; `line` is the template of a choice.
    """

    needs: tuple[str, ...]
    reads: tuple[Column, ...]
    parse: Callable[[Columns, DataRow, int], Item]
    prompt: str
    open_prompt: str = ""
    line: str = "({letter}) {choice}"

    def words(self, item: Item) -> dict[str, Any]:
        """Return the values of the template fields for a question, except subtitles and further columns."""
        lines = [self.line.format(letter=chr(65 + i), choice=choice) for i, choice in enumerate(item.choices)]
        return {"hint": "", **item.named, "question": item.question, "choices": "\n".join(lines)}


def benchmark_rows(path: Path, name: Benchmark) -> Iterator[DataRow]:
    """Read the rows of a file or folder; a row that lacks columns of its benchmark gets a `fault`."""
    needs = FORMATS[name].needs
    for row in Rows(path, path):
        lacks = [column for column in needs if column not in row.columns]
        wanted = f"no row of {name}, it lacks {', '.join(lacks)}: {', '.join(map(str, row.columns))[:200]}"
        yield row if row.fault or not lacks else replace(row, columns={}, fault=wanted)


def mmmu(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of MMMU (arXiv 2311.16502): `options` and several answers are Python lists as text."""
    uid, kind = text(columns.get("id"), "id"), text(columns.get("question_type"), "question_type")
    choices = _texts(columns.get("options"), "options") if kind == "multiple-choice" else ()
    answers = () if columns.get("answer") in (None, "", "?") else _texts(columns["answer"], "answer")
    named = {"question_type": kind, "subject": "_".join(uid.split("_")[1:-1])}
    images = ((f"<image {i}>", columns.get(f"image_{i}")) for i in IMAGES)
    media = tuple(("image", value, mark) for mark, value in images if has_content(value))
    question = text(columns.get("question"), "question")
    marked = set(re.findall(r"<image \d+>", "\n".join((question, *choices))))
    if lost := sorted(marked - {mark for _, _, mark in media}):
        raise RowError(f"its text shows {lost[0]}, but the row has no such image")
    answers = _letters(answers, choices) if kind == "multiple-choice" else answers
    return Item(uid, question, answers, choices, media, named)


def mathvista(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of MathVista (arXiv 2310.02255), whose `query` has the question, choices and a hint."""
    kind, answer = text(columns.get("answer_type"), "answer_type"), columns.get("answer")
    choices = _texts(columns["choices"], "choices") if has_content(columns.get("choices")) else ()
    answers = (answer_of(answer, "answer"),) if has_content(answer) else ()
    if choices and answers and answers[0] not in choices:
        raise RowError(f"the answer {short(answer)} is none of its `choices`, {short(list(choices))}")
    given = columns.get("metadata")
    named = {**({} if given is None else mapping(given, "metadata")), "answer_type": kind}
    named["question_type"] = columns.get("question_type")
    if kind == "float" and answers:
        named["precision"] = number(columns.get("precision"), "precision")
    image = next((columns[c] for c in ("decoded_image", "image") if has_content(columns.get(c))), None)
    query = text(columns.get("query"), "query")
    return Item(answer_of(columns.get("pid"), "pid"), query, answers, choices, (("image", image, ""),), named)


def mmbench(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse an MMBench row (arXiv 2307.06281): its image in base64, or the `index` of the row that has it."""
    index = number(columns.get("index"), "index")
    if index % 1 or index < 0:
        raise RowError(f"wanted a whole number as `index`, got {short(columns['index'])}")
    given = [columns.get(letter) for letter in ascii_uppercase]
    filled = [has_content(choice) and choice != "nan" for choice in given]
    count = filled.index(False)
    if count < 2 or any(filled[count:]):
        raise RowError("wanted at least two choices, in the columns A, B, ... without a gap")
    choices = tuple(answer_of(choice, ascii_uppercase[i]) for i, choice in enumerate(given[:count]))
    answers = (text(columns["answer"], "answer"),) if has_content(columns.get("answer")) else ()
    hint = columns.get("hint")
    named = {name: columns.get(name) for name in ("category", "l2-category")}
    named["hint"] = f"Hint: {text(hint, 'hint')}\n" if has_content(hint) and hint != "nan" else ""
    image = columns.get("image")
    shared = image if isinstance(image, str) and image.isdecimal() else ""
    question, media = text(columns.get("question"), "question"), () if shared else (("image", image, ""),)
    uid, cluster = str(int(index)), str(int(index % ROTATION))
    return Item(uid, question, _letters(answers, choices), choices, media, named, cluster, shared)


def ocrbench(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of OCRBench (arXiv 2305.07895), from its JSON file or the parquet file on the hub."""
    image, answers = _first(columns, "image_path", "image"), _first(columns, "answers", "answer")
    dataset, kind = _first(columns, "dataset_name", "dataset"), _first(columns, "type", "question_type")
    named = {"dataset": text(dataset, "dataset_name"), "type": text(kind, "type")}
    listing = answers if isinstance(answers, list | tuple) else [answers]
    right = tuple(answer_of(answer, f"answers[{i}]") for i, answer in enumerate(listing))
    # Number the rows, because the file's `id` is not unique.
    return Item(
        str(place), text(columns.get("question"), "question"), right, (), (("image", image, ""),), named
    )


def chartqa(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of ChartQA (arXiv 2203.10244), from its JSON files or the parquet files on the hub."""
    image, answers = _first(columns, "imgname", "image"), _first(columns, "label", "answer")
    listing = answers if isinstance(answers, list | tuple) else [answers]
    right = tuple(answer_of(answer, f"label[{i}]") for i, answer in enumerate(listing))
    kind = _first(columns, "type", "human_or_machine")
    written = {0: "human", 1: "augmented", None: row.split}.get(kind, str(kind))
    named = {"type": next((name for name in ("human", "augmented") if name in written), "")}
    question = text(_first(columns, "query", "question"), "query")
    return Item(f"{row.split}#{place}", question, right, (), (("image", image, ""),), named)


def video_mme(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of Video-MME (arXiv 2405.21075), whose `options` begin with their letters."""
    options = _texts(columns.get("options"), "options")
    choices = tuple(re.sub(r"^[A-Z]\.\s*", "", option) for option in options)
    video, uid = text(columns.get("videoID"), "videoID"), text(columns.get("question_id"), "question_id")
    answers = (text(columns["answer"], "answer"),) if has_content(columns.get("answer")) else ()
    named = {name: columns.get(name) for name in ("duration", "domain", "sub_category", "task_type")}
    named["video"], media = video, (("video", video, ""),)
    question = text(columns.get("question"), "question")
    return Item(uid, question, _letters(answers, choices), choices, media, named, video)


def mvbench(columns: Columns, row: DataRow, place: int) -> Item:
    """Parse a row of MVBench (arXiv 2311.17005); the file name is the task, which sets the video folder."""
    if row.split not in FOLDER_OF:
        raise RowError(f"'{row.split}' is no task of MVBench; its files are named {', '.join(FOLDER_OF)}")
    choices, answer = _texts(columns.get("candidates"), "candidates"), text(columns.get("answer"), "answer")
    if answer not in choices:
        raise RowError(f"the answer {short(answer)} is none of its `candidates`, {short(list(choices))}")
    start, end = (number(columns[n], n) if columns.get(n) is not None else None for n in ("start", "end"))
    name = f"{FOLDER_OF[row.split]}/{text(columns.get('video'), 'video')}"
    question, media = text(columns.get("question"), "question"), (("video", name, ""),)
    uid, named = f"{row.split}#{place}", {"task": row.split}
    return Item(uid, question, (answer,), choices, media, named, name, bounds=(start, end))


def _first(columns: Columns, *names: str) -> Any:
    """Return the value of the first of these columns that has content; None if all are empty."""
    return next((columns[name] for name in names if has_content(columns.get(name))), None)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    """Convert a list, a text that contains a Python list, or a single text to a tuple of texts."""
    values = value
    if isinstance(value, str):
        try:
            values = ast.literal_eval(value) if value.lstrip().startswith("[") else [value]
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise RowError(f"wanted a list of texts as `{name}`, got {short(value)}") from error
    return tuple(answer_of(each, f"{name}[{i}]") for i, each in enumerate(listed(values, name)))


def _letters(answers: tuple[str, ...], choices: tuple[str, ...]) -> tuple[str, ...]:
    """Check that there are at most 26 choices, and that every answer is the letter of a choice."""
    letters = ascii_uppercase[: len(choices)]
    if len(choices) > len(letters) or not all(len(answer) == 1 and answer in letters for answer in answers):
        raise RowError(
            f"wanted letters of the {len(choices)} choices as `answer`, got {short(list(answers))}"
        )
    return answers


DIRECTLY = "Answer with the option's letter from the given choices directly."
VIDEO_ASK = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only "
    "the letter (A, B, C, or D) of the correct option.\n{question}\n{choices}\nThe best answer is:"
)
MV_ASK = (
    "Carefully watch the video and pay attention to the cause and sequence of events, the detail and "
    "movement of objects, and the action and pose of persons. Based on your observations, select the best "
    "option that accurately addresses the question.\nQuestion: {question}\nOptions:\n{choices}\n"
    "Only give the best option."
)
FORMATS: dict[Benchmark, Format] = {
    "mmmu": Format(
        ("id", "options", "question_type"),
        ("question", "options", "answer", "question_type", *(f"image_{i}" for i in IMAGES)),
        mmmu,
        f"{{question}}\n\n{{choices}}\n\n{DIRECTLY}",
        "{question}\n\nAnswer the question using a single word or phrase.",
    ),
    "mathvista": Format(
        ("pid", "query", "answer_type"),
        ("pid", "query", "question", "image", "decoded_image", "choices", "answer", "unit", "precision")
        + ("question_type", "answer_type", "metadata"),
        mathvista,
        "{question}",
        "{question}",
    ),
    "mmbench": Format(
        ("index", "question", "A", "B"),
        ("index", "question", "hint", "answer", "image", "category", "l2-category", *ascii_uppercase),
        mmbench,
        "{hint}Question: {question}\nOptions:\n{choices}\n"
        "Please select the correct answer from the options above. \n",
        line="{letter}. {choice}",
    ),
    "ocrbench": Format(
        ("question",),
        (("image_path", "image"), "question", ("answers", "answer"), ("dataset_name", "dataset"))
        + (("type", "question_type"),),
        ocrbench,
        "",
        "{question}",
    ),
    "chartqa": Format(
        (),
        (("imgname", "image"), ("query", "question"), ("label", "answer"), ("type", "human_or_machine")),
        chartqa,
        "",
        "{question}",
    ),
    "video_mme": Format(
        ("question_id", "videoID", "options"),
        ("question_id", "videoID", "question", "options", "answer", "duration", "domain", "sub_category")
        + ("task_type",),
        video_mme,
        f"{{subtitles}}{VIDEO_ASK}",
        line="{letter}. {choice}",
    ),
    "mvbench": Format(
        ("video", "question", "candidates"),
        ("video", "question", "candidates", "answer", "start", "end"),
        mvbench,
        MV_ASK,
    ),
}
