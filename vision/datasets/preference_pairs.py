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
from mmrl.core.types import Frames, Media, Outcome, Prompt
from mmrl.data.dataset_io import DataRow, Rows, parquet_of, read_prompts
from mmrl.data.fields import RowError, listed, mapping, number, short, uid_of, unpacked
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
from mmrl.vision.media.media_root import MediaRoot, decode_image, media_refs
from mmrl.vision.media.video import FrameSampling

log = logging.getLogger("mmrl")
SIDES = ("chosen", "rejected")
EXPORTED = ("conversations", "chosen_answer", "rejected_answer")  # the same pair once more, for LLaMA-Factory
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

    Texts may be messages; `chosen` and `rejected` are one answer each, or conversations that part before
    their last turn, whose prompt is what both begin with. A list of rejected answers makes a pair of each,
    the second with the id `id/2`; `score_rejected` may be a list of as many. The prompt may also stand in
    `question` or `messages`, with a `system` prompt before it, as in converted rows. The chat template writes
    calls and thoughts beside an answer. Images are paths or encoded; those inside parquet are decoded when
    they are used. The answers, the chosen one first, differ, and record `preferred`, 1 and 0, and `score`:
    `score_chosen` and `score_rejected` of the row, or `preferred` without them.

    Args:
        path: jsonl, JSON, parquet, or a folder of these.
        root: Folder of the images; by default that of the rows.
        min_gap: Least difference of the two scores; other pairs are skipped.
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most pairs to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    close = 0

    def make(row: DataRow, position: int) -> Prompt | None:
        nonlocal close
        columns = row.columns
        kept = {key: value for key, value in row.all.items() if key not in LEFT_OUT}
        asked, *sides = _shared(columns)
        answers = tuple(_answer(columns, *both) for both in zip(SIDES, sides, strict=True))
        said = [((answer.text or "").strip(), answer.extra) for answer in answers]
        if said[0] == said[1]:
            raise RowError(f"wanted `chosen` and `rejected` that differ, got {short(answers[0].text)} twice")
        read = media.reader(row.place, FrameSampling())
        messages = read_messages(asked, list(_images(row, media)), read)
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
    """A file of rows that gives each row with one of its rejected answers."""

    file: RowFile
    place: int

    def row(self, found: Found) -> DataRow:
        return list(_each_rejected(self.file.row(found._replace(file=self.file))))[self.place]


def _each_rejected(row: DataRow) -> Iterator[DataRow]:
    """Make a row of each rejected answer, where a row has several: texts, or lists of messages."""
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
        found = row.found and row.found._replace(file=_RejectedFile(row.found.file, place))
        yield replace(row, columns={**row.columns, **own}, found=found)


def _answer(columns: Mapping[str, Any], side: str, value: Any) -> Outcome:
    words, extra = recorded_turn(value, side)
    preferred, score = float(side == "chosen"), columns.get(f"score_{side}")
    score = preferred if score is None else number(score, f"score_{side}")
    return Outcome(text=words, extra=extra, recorded={"preferred": preferred, "score": score})


def _shared(columns: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected; turns that both conversations begin with belong to the prompt."""
    if has_content(columns.get("conversations")) and not has_content(columns.get("chosen_answer")):
        raise RowError("nothing reads the column `conversations` of a pair; convert it (`vision.converted`)")
    asked, sides = asked_of(columns), [spoken(columns.get(side)) for side in SIDES]
    known = as_turns(asked, "prompt") if has_content(asked) else []
    if known and mapping(known[-1], "prompt").get("role") == "assistant":
        # `messages` may repeat the chosen conversation, as in UltraFeedback.
        last = sides[0][-1] if _is_conversation(sides[0]) else sides[0]
        if recorded_turn(known[-1], "messages") != recorded_turn(last, "chosen"):
            raise RowError(f"the prompt ends with an answer, {short(known[-1])}, that is not the chosen one")
        asked = known = known[:-1]
    chosen, rejected = (_conversation(known, side, name) for side, name in zip(sides, SIDES, strict=True))
    if chosen is None or rejected is None:
        after = [None if talk is None else talk[len(known) :] for talk in (chosen, rejected)]
        asked = next((talk[: len(known)] for talk in (chosen, rejected) if talk and known), asked)
        return asked, after[0] or sides[0], after[1] or sides[1]
    pairs = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if same in (len(chosen), len(rejected)):
        raise RowError("wanted `chosen` and `rejected` that differ in their last turn, got equal ones")
    if same < len(known):
        raise RowError(
            f"`chosen` and `rejected` repeat the prompt, {short(known)}, in different ways; keep one"
        )
    return chosen[:same], chosen[same:], rejected[same:]


def _conversation(known: list[Any], side: Any, name: str) -> list[Any] | None:
    """Return messages with the prompt before them, which they may repeat; None for a side of another form."""
    if not _is_conversation(side):
        return None
    if side[0].get("role") in ("assistant", "tool"):
        return [*known, *side]
    # The system prompt of a row may stand in the prompt alone, or in the conversation alone.
    first, other = (bool(turns) and turns[0].get("role") == "system" for turns in (known, side))
    begins, talk = known[first and not other :], side[other and not first and bool(known) :]
    if not same_words(begins, talk[: len(begins)]):
        raise RowError(f"the prompt, {short(known)}, is not the one that `{name}` begins with; keep one")
    before = side[: len(side) - len(talk)]
    # The images of a prompt may stand in the conversations alone.
    asked = talk[: len(begins)] if holds_media(talk[: len(begins)]) else begins
    return [*before, *known[: len(known) - len(begins)], *asked, *talk[len(begins) :]]


def _is_conversation(value: Any) -> bool:
    match value:
        case [{"role": _}, *_]:
            return True
    return False


# ---- images; those inside parquet are read again when they are used, and do not stay in memory


def _images(row: DataRow, root: MediaRoot) -> Iterator[Media]:
    for name in ("image", "images"):
        for i, ref in enumerate(media_refs(row.columns.get(name), "image", name)):
            if ref.data and row.source.endswith(".parquet"):
                what, path = f"{name} {i} of {row.place}", Path(row.source)
                position = int(row.place.removeprefix(row.source).strip("[]"))  # a place is `file[row]`
                yield Media("image", what, _ImageOfGroup(path, position, name, i, what), path)
            else:
                yield root.medium(ref, row.place, FrameSampling())


@dataclass(frozen=True)  # equal for the same image, as `Media.load` has to be
class _ImageOfGroup:
    """Reads and decodes one of the images of a row of a parquet file."""

    path: Path
    position: int
    column: str
    index: int
    what: str

    def __call__(self) -> Frames:
        with parquet_of(self.path) as file:
            position, group = self.position, 0
            while position >= (size := file.metadata.row_group(group).num_rows):
                position, group = position - size, group + 1
            table = file.read_row_group(group, [self.column])  # one column of one group
        value = table[self.column][position].as_py()
        return decode_image(list(media_refs(value, "image", self.column))[self.index].data, self.what)
