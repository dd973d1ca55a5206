"""Data set of preference pairs about images: a chosen and a rejected answer to each prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt
from mmrl.config.registry import data
from mmrl.core.types import Outcome, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, listed, mapping, number, short, uid_of, unpacked
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.messages import (
    ASKED,
    as_turns,
    asked_of,
    holds_media,
    read_messages,
    recorded_turn,
    same_words,
    spoken,
)
from mmrl.data.row_fields import has_content
from mmrl.data.row_files import Found, RowFile
from mmrl.data.video import FrameSampling

log = logging.getLogger("mmrl")
SIDES = ("chosen", "rejected")
EXPORTED = ("conversations", "chosen_answer", "rejected_answer")  # copy of the pair for LLaMA-Factory
LEFT_OUT = ("image", "images", "prompt", "question", "messages", "system", *SIDES, *EXPORTED)
READS = (ASKED, "messages", "system", "image", "images", *SIDES, "score_chosen", "score_rejected", *EXPORTED)


@data
def preference_pairs(
    *,
    path: str,
    root: str = "",
    min_gap: NonNegativeFloat = 0.0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read preference pairs in TRL's columns: `prompt`, `chosen`, `rejected`, and `images` or `image`.

    The prompt is a text or messages; it may also be in `question` or `messages`, with a `system` prompt
    before it. `chosen` and `rejected` are one answer each, or two conversations with the prompt as their
    common beginning. A list of rejected answers gives one pair for each; the second has the id `id/2`. Then
    `score_rejected` may be a list of the same length. Images are paths or encoded images. The prompt stores
    the chosen answer first and the rejected one second. Both record `preferred` (1 or 0) and `score`, which
    is `score_chosen` or `score_rejected` of the row, or else `preferred`.

    Args:
        path: A file of jsonl, JSON or parquet, or a folder of such files.
        root: Folder of the images; by default the folder of the rows.
        min_gap: Smallest difference of the two scores; other pairs are skipped.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of pairs to read; 0: all pairs.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    close = 0

    def make(row: DataRow, position: int) -> Prompt | None:
        nonlocal close
        columns = row.columns
        kept = {key: value for key, value in row.all.items() if key not in LEFT_OUT}
        question, *sides = _prompt_and_answers(columns)
        answers = tuple(_answer(columns, *both) for both in zip(SIDES, sides, strict=True))
        contents = [((answer.text or "").strip(), answer.extra) for answer in answers]
        if contents[0] == contents[1]:
            raise RowError(f"wanted `chosen` and `rejected` that differ, got {short(answers[0].text)} twice")
        refs = (ref for name in ("image", "images") for ref in media_refs(columns.get(name), "image", name))
        images = [media.medium(ref, row.place, FrameSampling()) for ref in refs]
        messages = read_messages(question, images, media.reader(row.place, FrameSampling()))
        better, worse = (answer.recorded["score"] for answer in answers)
        if abs(better - worse) < min_gap:
            close += 1
            return None
        return Prompt(uid_of(columns, f"{row.split}#{position}"), messages, None, answers, kept)

    rows = (part for row in Rows(source, media.root) for part in _each_rejected(row))
    prompts = read_prompts(source, rows, make, reads=READS, bad_rows=bad_rows, limit=limit)
    if close:
        log.warning("left out %d pairs of '%s' that are less than %g apart", close, source, min_gap)
    return prompts


@dataclass(frozen=True)
class _RejectedFile:
    """View of a data file in which every row keeps only one of its rejected answers."""

    file: RowFile
    place: int

    def row(self, found: Found) -> DataRow:
        return list(_each_rejected(self.file.row(found._replace(file=self.file))))[self.place]


def _each_rejected(row: DataRow) -> Iterator[DataRow]:
    """Split a row with several rejected answers (texts or lists of messages) into one row per answer."""
    several, scores = unpacked(row.columns.get("rejected")), unpacked(row.columns.get("score_rejected"))
    if not (isinstance(several, list) and len(several) > 1 and all(type(s) in (str, list) for s in several)):
        yield row
        return
    for place, rejected in enumerate(several):
        own: dict[str, Any] = {"rejected": rejected}
        if isinstance(scores, list):
            own["score_rejected"] = listed(scores, "score_rejected", len(several))[place]
        if place and row.columns.get("id") is not None:
            own["id"] = f"{row.columns['id']}/{place + 1}"
        location = row.found and row.found._replace(file=_RejectedFile(row.found.file, place))
        yield replace(row, columns={**row.columns, **own}, found=location)


def _answer(columns: Mapping[str, Any], side: str, value: Any) -> Outcome:
    words, extra = recorded_turn(value, side)
    preferred, score = float(side == "chosen"), columns.get(f"score_{side}")
    score = preferred if score is None else number(score, f"score_{side}")
    return Outcome(text=words, extra=extra, recorded={"preferred": preferred, "score": score})


def _prompt_and_answers(columns: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer. Turns that begin both conversations form the prompt."""
    if has_content(columns.get("conversations")) and not has_content(columns.get("chosen_answer")):
        raise RowError("nothing reads the column `conversations` of a pair; convert it (`vision.converted`)")
    question, sides = asked_of(columns), [spoken(columns.get(side)) for side in SIDES]
    prompt = as_turns(question, "prompt") if has_content(question) else []
    if prompt and mapping(prompt[-1], "prompt").get("role") == "assistant":
        # `messages` may repeat the chosen conversation with its answer, as in UltraFeedback.
        last = sides[0][-1] if _is_conversation(sides[0]) else sides[0]
        if recorded_turn(prompt[-1], "messages") != recorded_turn(last, "chosen"):
            raise RowError(f"the prompt ends with an answer, {short(prompt[-1])}, that is not the chosen one")
        question = prompt = prompt[:-1]
    chosen, rejected = (_conversation(prompt, side, name) for side, name in zip(sides, SIDES, strict=True))
    if chosen is None or rejected is None:
        after = [None if talk is None else talk[len(prompt) :] for talk in (chosen, rejected)]
        question = next((talk[: len(prompt)] for talk in (chosen, rejected) if talk and prompt), question)
        return question, after[0] or sides[0], after[1] or sides[1]
    pairs = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if same in (len(chosen), len(rejected)):
        raise RowError("wanted `chosen` and `rejected` that differ in their last turn, got equal ones")
    if same < len(prompt):
        raise RowError(
            f"`chosen` and `rejected` repeat the prompt, {short(prompt)}, in different ways; keep one"
        )
    return chosen[:same], chosen[same:], rejected[same:]


def _conversation(prompt: list[Any], side: Any, name: str) -> list[Any] | None:
    """Join the prompt and one side's messages, which may repeat the prompt; None without messages."""
    if not _is_conversation(side):
        return None
    if side[0].get("role") in ("assistant", "tool"):
        return [*prompt, *side]
    # Ignore a system prompt that only the prompt or only the side has.
    first, other = (bool(turns) and turns[0].get("role") == "system" for turns in (prompt, side))
    begins, talk = prompt[first and not other :], side[other and not first and bool(prompt) :]
    if not same_words(begins, talk[: len(begins)]):
        raise RowError(f"the prompt, {short(prompt)}, is not the one that `{name}` begins with; keep one")
    before = side[: len(side) - len(talk)]
    # Keep the version with media: often only the conversation contains the images of the prompt.
    repeated = talk[: len(begins)] if holds_media(talk[: len(begins)]) else begins
    return [*before, *prompt[: len(prompt) - len(begins)], *repeated, *talk[len(begins) :]]


def _is_conversation(value: Any) -> bool:
    match value:
        case [{"role": _}, *_]:
            return True
    return False
