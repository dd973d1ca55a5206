"""Data set of conversations about images, videos and sounds, in the row format of TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
SOUND = "load_audio_from_video"
READS = (ASKED, "messages", TARGETS, "system", "completion", "environment", SOUND)


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
    load_audio_from_video: bool = False,
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read prompts with media in TRL's row format from jsonl, JSON, parquet or a saved `datasets` folder.

    A row has a `prompt` (a text or messages), a `question`, or `messages`, and optionally a `system` prompt.
    A recorded answer is in `completion`, or is the last turn of `messages`. A row with only an `environment`
    has an empty prompt, which the environment fills (`vision.with_environments`). Media in `image`, `images`,
    `video`, `videos`, `audio`, `audios` fill the placeholders in the messages; if there are no placeholders,
    they start the first user message. The target is the first of `solution`, `answer` and `target` with a
    value. Rewards get all other columns by name. A row with a known column that would be ignored is invalid.

    Args:
        path: The file or folder of rows.
        root: Folder of the media; by default the folder of the rows.
        columns: Maps the column names above to columns of the file; an empty name omits a column.
        system_prompt: A system message for prompts without one.
        frames_per_second: Sampling rate of video frames.
        max_frames: Maximum number of frames per video.
        total_pixels: Maximum number of pixels of all frames of a video; 0: no limit.
        load_audio_from_video: Whether to load videos with their sound, for models such as Qwen-Omni. Silent
            videos are not affected. A column of the same name overrides the option for its row.
        bad_rows: Treatment of rows that cannot be used. `error`: raise an error. `drop`: skip and log them.
        limit: Maximum number of rows to read; 0: all rows.
    """
    source, media = Path(path), MediaRoot.of_rows(Path(path), root)
    sampling = FrameSampling(frames_per_second, max_frames=max_frames, total_pixels=total_pixels)

    def make(row: DataRow, number: int) -> Prompt:
        fields = row.renamed(columns)
        question, answers = _question_and_answer({**row.others, **fields})
        question = _after_system(system_prompt, question) if system_prompt else question
        chosen = replace(sampling, load_audio_from_video=_with_sound(fields, load_audio_from_video))
        shown = [
            media.medium(ref, row.place, chosen)
            for name, kind in media_columns().items()
            for ref in media_refs(fields.get(name), kind, name)
        ]
        if question == "" and fields.get("environment"):
            messages = (Message("user", tuple(Part(media=medium) for medium in shown) or (Part(),)),)
        else:
            messages = read_messages(question, shown, media.reader(row.place, chosen))
        # Columns for rewards; omit media and answers, which the prompt already holds in decoded form.
        left_out = (*media_columns(), "messages", "completion", "system", SOUND)
        kept = {key: value for key, value in {**row.others, **fields}.items() if key not in left_out}
        kept["prompt"] = question if type(question) is str and question else _as_rewards_see(messages)
        return Prompt(uid_of(fields, f"{row.split}#{number}"), messages, _target(fields), answers, kept)

    rows, reads = Rows(source, media.root), declared((*READS, *media_columns()), columns)
    return read_prompts(source, rows, make, reads=reads, bad_rows=bad_rows, limit=limit)


def _after_system(system_prompt: str, question: Any) -> list[Any]:
    """Prepend `system_prompt` to the turns of a prompt, unless they begin with a system message."""
    turns = as_turns(question, "prompt")
    if turns and mapping(turns[0], "prompt[0]").get("role") == "system":
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def _with_sound(fields: Mapping[str, Any], default: bool) -> bool:
    """Return whether to load a row's videos with sound; raise `RowError` if the column is no boolean."""
    value = default if fields.get(SOUND) is None else fields[SOUND]
    if not isinstance(value, bool):
        raise RowError(f"wanted true or false as `{SOUND}`, got {short(value)}")
    return value


def _question_and_answer(fields: Mapping[str, Any]) -> tuple[Any, tuple[Outcome, ...]]:
    """Return a row's prompt (empty with only an `environment`) and its recorded answers (one or none)."""
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
    if type(fields.get("label", fields.get("kto_tag"))) is bool:
        raise RowError(
            "a true or false `label` beside an answer is KTO's; `vision.unpaired_preferences` reads it"
        )
    return question, (Outcome(text=words, extra=extra),)


def _target(fields: Mapping[str, Any]) -> Any:
    """Return the first target of a row; numbers become strings, booleans yes or no, and lists tuples."""
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
    """Format messages as TRL passes them to rewards: with media, contents are lists of content blocks."""
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
