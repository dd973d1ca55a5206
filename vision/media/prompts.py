"""Prompts about pictures, and ready-made answers to them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.core.types import Media, Message, Outcome, Part, Prompt
from mmrl.data.fields import RowError, is_number, short, text
from mmrl.vision.media.media_root import MediaRoot

MARKS = re.compile(r"<(image|video)>")  # where a text wants its media
log = logging.getLogger("mmrl")


def ask(uid: str, media: Sequence[Media], asked: str, target: Any, columns: Mapping[str, Any]) -> Prompt:
    """Show media, then ask."""
    message = Message("user", (*(Part(media=one) for one in media), Part(asked)))
    return Prompt(uid, (message,), target, columns=columns)


def with_answers(prompts: Sequence[Prompt], answers: Mapping[str, str], source: str) -> list[Prompt]:
    """Give prompts the ready-made answers of their ids. Those without one are counted in the log and left
    out; an answer to nothing is an error."""
    unknown = sorted(set(answers) - {prompt.uid for prompt in prompts})
    if unknown:
        raise ValueError(
            f"'{source}' answers {len(unknown)} prompts that there are not, such as '{unknown[0]}'"
        )
    kept = [
        replace(prompt, answers=(Outcome(text=answers[prompt.uid]),))
        for prompt in prompts
        if prompt.uid in answers
    ]
    if len(kept) < len(prompts):
        log.warning("'%s' answers %d of %d prompts; the others are left out", source, len(kept), len(prompts))
    return kept


def root_of(root: str, answers: str, what: str) -> MediaRoot:
    """Find the folder of the media; it may be left out where answers are ready."""
    if not root and not answers:
        raise ValueError(f"{what}: name the folder of the pictures (`root`), or ready-made `answers`")
    return MediaRoot(Path(root))


def interleaved(words: str, media: Sequence[Media]) -> tuple[Part, ...]:
    """Put media where a text marks them with <image> and <video>, or all before it where it marks none."""
    marks = MARKS.findall(words)
    if not marks:
        return (*(Part(media=one) for one in media), Part(words))
    if marks != [one.kind for one in media]:
        held = ", ".join(one.kind for one in media) or "nothing"
        raise RowError(f"the text marks {', '.join(marks)}, but the row holds {held}")
    left = iter(media)
    parts = [Part(media=next(left)) if i % 2 else Part(piece) for i, piece in enumerate(MARKS.split(words))]
    return tuple(part for part in parts if part.media or part.text.strip())


def answers_of(columns: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Find the right answer of a row, or all that are right."""
    name = "answers" if columns.get("answer") is None and columns.get("answers") is not None else "answer"
    given = columns.get(name)
    if not isinstance(given, list | tuple):
        return answer_of(given, name)
    if not given:
        raise RowError(f"wanted at least one answer as `{name}`, got {short(given)}")
    return tuple(answer_of(one, f"{name}[{i}]") for i, one in enumerate(given))


def answer_of(value: Any, name: str) -> str:
    """Let a text, a number, or true and false through, in words."""
    match value:
        case bool():
            return "yes" if value else "no"
        case _ if is_number(value):
            return str(value)
    return text(value, name)
