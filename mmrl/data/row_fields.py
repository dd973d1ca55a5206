"""Checks of data columns: a column that nothing reads raises an error, or is logged once."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from mmrl.core.modalities import media_columns
from mmrl.core.types import Prompt
from mmrl.data.fields import RowError
from mmrl.data.row_files import DataRow

log = logging.getLogger("mmrl")

# The name of a column, or alternative names: the first column with content is read.
Column = str | tuple[str, ...]
ALWAYS = ("id", "split")  # read from every row
ONCE = "the row asks in more than one column; keep the one that is meant"
SHOWN = "this data set shows no media of that column"
PAIRS = "`vision.preference_pairs` reads pairs, a rejected answer in each row"
TOOLKIT = "`mmrl build` converts rows of other toolkits (`vision.converted`)"
KTO = (
    "`vision.unpaired_preferences` reads labelled answers, for KTO; or keep the rows of wanted answers, or "
    "make pairs of them"
)
# Columns of model input in formats of TRL, LLaMA-Factory, ms-swift, verl, LLaVA and OpenAI, which must not be
# ignored silently, with advice for the error message.
ASKING: dict[str, str] = {
    **dict.fromkeys(("prompt", "messages"), ONCE),
    **dict.fromkeys(media_columns(), SHOWN),
    **dict.fromkeys(("tools", "functions"), "give tools to the run's engine, by `tools`"),
    **dict.fromkeys(("rejected_images", "rejected_videos", "rejected_audios"), PAIRS),
    "chosen_images": "the images of the chosen answer are in `images`",
    **dict.fromkeys(("conversations", "conversation", "instruction", "input", "query", "history"), TOOLKIT),
    "input_audio": "sounds are in the columns `audio` and `audios`",
    "system": "put it before the question, as a message of the role `system`",
    "chat_template_kwargs": "set `policy.chat_template_kwargs`, for all rows",
}
# The same for columns of answers and their labels, except that a reward may read them by name.
JUDGING: dict[str, str] = {
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output"), PAIRS),
    **dict.fromkeys(("rejected_response", "rejected_messages", "response", "output"), TOOLKIT),
    **dict.fromkeys(("reward_model", "objects"), TOOLKIT),
    **dict.fromkeys(("completion", "completions"), "`vision.conversations` reads one recorded answer"),
    **dict.fromkeys(("label", "kto_tag"), KTO),
    "labels": "keep the rows of wanted answers, or make pairs of them",
    "choices": "write them into the question, or read rows with `vision.visual_qa`",
}


@dataclass(frozen=True)
class NamedColumns:
    """The columns that the pieces of a run read by name: rewards, filters, metrics, templates.

    `every` is True if a reward in TRL's form takes all columns (`**kwargs`).
    """

    names: frozenset[str] = frozenset()
    every: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.names or self.every and name not in ASKING


# Columns that pieces of the current run read; None outside of a run.
NAMED: ContextVar[NamedColumns | None] = ContextVar("NAMED", default=None)
# Function that raises `PromptError` for prompts that the run's model cannot read; None without a model.
CHECK: ContextVar[Callable[[Prompt], None] | None] = ContextVar("CHECK", default=None)


def declared(columns: Iterable[Column], renamed: Mapping[str, str] | None = None) -> tuple[Column, ...]:
    """List the columns of a file that a data set reads, after renaming by its option `columns`.

    Mapping a column to "" ignores it without a warning.
    """
    theirs = dict(renamed or {})
    read = [
        theirs.get(column, column) if isinstance(column, str) else tuple(theirs.get(c, c) for c in column)
        for column in columns
    ]
    return (*read, *theirs.values(), *(ours for ours, name in theirs.items() if not name))


def has_content(value: Any) -> bool:
    """Whether a field has content: not null, NaN, or an empty text, list or object."""
    match value:
        case None | "" | b"":
            return False
        case float():
            return not math.isnan(value)
        case Mapping():
            return any(map(has_content, value.values()))
        case list() | tuple():
            return any(map(has_content, value))
    return True


class RowFields:
    """Splits rows into columns that a data set declares and other columns, and finds unread columns.

    `unread` counts the rows of each column that nothing reads.
    """

    def __init__(self, reads: Iterable[Column]) -> None:
        self.reads, self.named = (*reads, *ALWAYS), NAMED.get() or NamedColumns()
        self.unread: Counter[str] = Counter()

    def parted(self, row: DataRow) -> DataRow:
        """Split a row into the columns that the data set reads and `others`.

        Raises `RowError` for an unread, non-empty column that is in `ASKING` or `JUDGING`.
        """
        filled = {name for name, value in row.columns.items() if has_content(value)}
        reads: set[str] = set()
        for column in self.reads:
            names = (column,) if isinstance(column, str) else column
            reads.add(next((name for name in names if name in filled), names[0]))
        unread = sorted(name for name in filled - reads if name not in self.named)
        for name in unread:
            if advice := ASKING.get(name) or JUDGING.get(name):
                raise RowError(f"nothing reads the column `{name}`: {advice}, or leave the column out")
        self.unread.update(unread)
        columns = {name: value for name, value in row.columns.items() if name in reads}
        others = {name: value for name, value in row.columns.items() if name not in reads}
        return replace(row, columns=columns, others=others)


def warn_unread(columns: Mapping[str, int], source: Any, advice: str = "") -> None:
    """Log the columns that nothing reads, each with its number of rows; do nothing if there are none."""
    if columns:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(columns.items()))
        more = advice and f"; {advice}"
        log.warning("nothing reads these columns of '%s', with so many rows: %s%s", source, names, more)
