"""Data set of stepwise retrieval: every step of a row is a prompt of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Message, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, listed, mapping, short, text, uid_of
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import has_content
from mmrl.vision.media.media_root import MediaRef, MediaRoot, media_refs
from mmrl.vision.media.prompts import answers_of
from mmrl.vision.media.video import FrameSampling

QUESTIONS = ("problem", "prompt", "question")
READS = (QUESTIONS, "step_type", "system", "answer", "images", "uid", "row")
FORMATS = {"ret": "think,sub-question,ret", "ans": "think,answer"}


@data
def stepwise(
    *,
    path: str,
    root: str = "",
    steps: Literal["all", "ret", "ans"] = "all",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read rows of several steps, each of which becomes a prompt with a group of its own (Step-GRPO).

    R1-Router, arXiv 2505.22095. A row has `steps` and perhaps `images`, which every step that marks <image>
    shows. A step has `step_type`, `problem` (or `prompt`, `question`), perhaps `system`, and `answer`: for
    `ret` `{"query": ..., "retriever": [...]}`, for `ans` a text or a list of texts. So what a step knows of
    earlier ones is what its `problem` says: training is teacher-forced. Read them with `route_reward` and
    `answer_recall`; the column `format` has the blocks that `tag_format` wants.

    Args:
        path: jsonl, JSON, parquet or a folder of `datasets`.
        root: Folder of the images; by default that of the rows.
        steps: Which steps are prompts: `all`, only retrieval (`ret`) or only answers (`ans`).
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most prompts to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    step_rows = _StepRows(Rows(source, media.root))

    def make(row: DataRow, position: int) -> Prompt | None:
        step = row.columns
        kind = step.get("step_type")
        if kind not in FORMATS:
            raise RowError(f"wanted ret or ans as `step_type`, got {short(kind)}")
        if steps not in ("all", kind):
            return None
        question = text(next((step[name] for name in QUESTIONS if name in step), None), QUESTIONS[0])
        # Every step of the row marks those of the row's images that it shows; one without marks shows none.
        refs: list[MediaRef] = list(media_refs(step.get("images"), "image", "images"))
        refs = refs[: question.count("<image>")]
        shown = [media.medium(ref, row.place, FrameSampling()) for ref in refs]
        parts = interleaved(question, shown) if shown or "<image>" in question else (Part(question),)
        system = step.get("system")
        head = (Message("system", (Part(text(system, "system")),)),) if system else ()
        columns = {key: value for key, value in row.all.items() if key not in ("images", "answer")}
        columns |= {"step_type": kind, "format": FORMATS[kind]}
        target = _route(step.get("answer")) if kind == "ret" else answers_of(_as_answers(step.get("answer")))
        return Prompt(step["uid"], (*head, Message("user", parts)), target, columns=columns)

    return read_prompts(source, step_rows, make, reads=READS, bad_rows=bad_rows, limit=limit)


@dataclass(frozen=True)
class _StepRows:
    """The steps of rows, as rows: with the row's id and number as `uid`, its images, and its place."""

    rows: Rows

    def __iter__(self) -> Iterator[DataRow]:
        for number, row in enumerate(self.rows):
            try:
                if row.fault:
                    raise RowError(row.fault)
                base = uid_of(row.columns, f"{row.split}#{number}")
                found = listed(row.columns.get("steps"), "steps")
                if not found:
                    raise RowError("wanted at least one of `steps`, got none")
                fields = [mapping(step, f"steps[{i}]") for i, step in enumerate(found)]
            except RowError as error:
                yield DataRow(row.place, row.split, fault=str(error))
                continue
            shared = {key: value for key, value in row.columns.items() if key not in ("steps", "id", "split")}
            for i, step in enumerate(fields):
                own = {key: value for key, value in step.items() if has_content(value) or key not in shared}
                twice = [key for key in own if key != "images" and own[key] != shared.get(key, own[key])]
                fault = f"`{twice[0]}` of the step is not that of its row; keep one" if twice else ""
                whole = {**shared, **own, "uid": f"{base}/{i}", "row": base}
                yield DataRow(f"{row.place} steps[{i}]", row.split, whole, fault)


def _as_answers(value: Any) -> Mapping[str, Any]:
    match value:
        case [*_]:
            return {"answers": value}
    return {"answer": value}


def _route(value: Any) -> Mapping[str, Any]:
    """Read the target of a retrieval step: a sub-question, and one retriever or a list of them."""
    route = mapping(value, "answer")
    match route.get("retriever"):
        case str(name):
            several = [name]
        case named:
            several = listed(named, "answer.retriever")
    if not several:
        raise RowError("wanted at least one name as `answer.retriever`, got none")
    retrievers = [text(name, f"answer.retriever[{i}]") for i, name in enumerate(several)]
    return {"query": text(route.get("query"), "answer.query"), "retriever": retrievers}
