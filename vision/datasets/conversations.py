"""Data set of conversations about images and videos, as rows for TRL's GRPOTrainer have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from mmrl.config.registry import data
from mmrl.core.modalities import media_columns
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, is_number, listed, mapping, short, uid_of
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.messages import ASKED, as_turns, asked_of, read_messages, recorded_turn
from mmrl.data.row_fields import declared, has_content
from mmrl.data.video import FrameSampling

TARGETS = ("solution", "answer", "target")
READS = (ASKED, "messages", TARGETS, "system", "completion", "environment")


@data
def conversations(
    *,
    path: str,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    system_prompt: str = "",
    frames_per_second: PositiveFloat = 2.0,
    max_frames: PositiveInt = 64,
    total_pixels: NonNegativeInt = 0,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read prompts with media in TRL's form from jsonl, JSON, parquet or a folder of `datasets`.

    A row has a `prompt` (a text or messages), a `question`, or `messages`, and perhaps a `system` prompt. A
    recorded answer is in `completion`, or is the last turn of `messages`. A row that only names its
    `environment` has an empty prompt, which the environment fills (`vision.with_environments`). Media in
    `image`, `images`, `video`, `videos` fill the places in the messages, or come first in the user's first
    message. The target is the first of `solution`, `answer` and `target`, if any. Rewards get all other
    columns by name; a column with a known meaning that nothing reads makes a bad row.

    Args:
        path: The file or folder of rows.
        root: Folder of the media; by default that of the rows.
        columns: Maps these column names to those of the file; an empty name leaves a column out.
        system_prompt: A system message before prompts that have none.
        frames_per_second: Sampling rate of video frames.
        max_frames: Most frames of a video.
        total_pixels: Most pixels of all frames of a video; 0 for no limit.
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most rows to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)

    def make(row: DataRow, number: int) -> Prompt:
        fields = row.renamed(columns)
        question, answers = _question_and_answer({**row.others, **fields})
        if system_prompt:
            turns = as_turns(question, "prompt")
            if not turns or mapping(turns[0], "prompt[0]").get("role") != "system":
                turns = [{"role": "system", "content": system_prompt}, *turns]
            question = turns

        shown = [
            media.medium(ref, row.place, sampling)
            for name, kind in media_columns().items()
            for ref in media_refs(fields.get(name), kind, name)
        ]
        if question == "" and fields.get("environment"):
            messages = (Message("user", tuple(Part(media=medium) for medium in shown) or (Part(),)),)
        else:
            messages = read_messages(question, shown, media.reader(row.place, sampling))
        # Encoded media would be stored twice.
        left_out = (*media_columns(), "messages", "completion", "system")
        kept = {key: value for key, value in {**row.others, **fields}.items() if key not in left_out}
        kept["prompt"] = question if type(question) is str and question else _as_rewards_see(messages)
        return Prompt(uid_of(fields, f"{row.split}#{number}"), messages, _target(fields), answers, kept)

    rows, reads = Rows(source, media.root), declared((*READS, *media_columns()), columns)
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)


def _question_and_answer(fields: Mapping[str, Any]) -> tuple[Any, tuple[Outcome, ...]]:
    """Return the prompt of a row, empty where only an environment is named, and its recorded answer."""
    question, answer = asked_of(fields), fields.get("completion")
    if question is None and fields.get("environment"):
        return "", ()
    turns = [] if type(question) is str else listed(question, "prompt` or `messages")
    if turns[1:] and mapping(turns[-1], f"prompt[{len(turns) - 1}]").get("role") == "assistant":
        if answer is not None or not has_content(fields.get("messages")):
            raise RowError(
                "the prompt ends with words of the assistant, from which no answer here goes on; give them "
                "as the `completion`, or the conversation as `messages`"
            )
        question, answer = turns[:-1], turns[-1:]
    if answer is None:
        return question, ()
    words, extra = recorded_turn(answer, "completion")
    label = fields.get("label", fields.get("kto_tag"))
    kto = {"label": 1.0 if label else -1.0} if label in (True, False) else {}  # also for 1 and 0
    return question, (Outcome(text=words, recorded=kto, extra=extra),)


def _target(fields: Mapping[str, Any]) -> Any:
    """Return the first target of a row; numbers as texts, lists as tuples."""
    value = next((fields[name] for name in TARGETS if fields.get(name) is not None), None)
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return tuple(value)
        case float() if not is_number(value):
            raise RowError(f"wanted a finite number as the target, got {short(value)}")
        case int() | float():
            return str(value)
    return value


def _as_rewards_see(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """Write messages as TRL's rewards get them: with media, contents are lists of parts."""
    parts = any(part.media for message in messages for part in message.parts)
    return [
        {
            **message.keys,
            "role": message.role,
            "content": [part.block for part in message.parts]
            if parts
            else "".join(part.text for part in message.parts),
        }
        for message in messages
    ]
