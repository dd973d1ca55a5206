"""Making prompts with images and videos, and attaching recorded answers to them."""

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

MARKS = re.compile(r"<(image|video)>")  # placeholders for media in texts of datasets
log = logging.getLogger("mmrl")


def ask(uid: str, media: Sequence[Media], asked: str, target: Any, columns: Mapping[str, Any]) -> Prompt:
    """Make a prompt of one user message: media, then a question."""
    message = Message("user", (*(Part(media=medium) for medium in media), Part(asked)))
    return Prompt(uid, (message,), target, columns=columns)


def with_answers(prompts: Sequence[Prompt], answers: Mapping[str, str], source: str) -> list[Prompt]:
    """Attach recorded answers to prompts by id.

    Prompts without an answer are counted in the log and left out; raises ValueError for an answer without
    a prompt.
    """
    unknown = sorted(set(answers) - {prompt.uid for prompt in prompts})
    if unknown:
        raise ValueError(f"'{source}' answers {len(unknown)} unknown prompts, such as '{unknown[0]}'")
    kept = [
        replace(prompt, answers=(Outcome(text=answers[prompt.uid]),))
        for prompt in prompts
        if prompt.uid in answers
    ]
    if len(kept) < len(prompts):
        log.warning("'%s' answers %d of %d prompts; the others are left out", source, len(kept), len(prompts))
    return kept


def root_of(root: str, answers: str, what: str) -> MediaRoot:
    """Make the root of the media; it is optional if there are recorded `answers`."""
    if not root and not answers:
        raise ValueError(f"{what}: name the folder of the images (`root`), or recorded `answers`")
    return MediaRoot(Path(root))


def interleaved(words: str, media: Sequence[Media]) -> tuple[Part, ...]:
    """Split a text at its <image> and <video> marks and insert the media; without marks, media come first."""
    marks = MARKS.findall(words)
    if not marks:
        return (*(Part(media=medium) for medium in media), Part(words))
    kinds = [medium.kind for medium in media]
    if marks != kinds:
        raise RowError(
            f"the text marks {', '.join(marks)}, but the row holds {', '.join(kinds) or 'nothing'}"
        )
    left = iter(media)
    parts = [Part(media=next(left)) if i % 2 else Part(piece) for i, piece in enumerate(MARKS.split(words))]
    return tuple(part for part in parts if part.media or part.text.strip())


def answers_of(columns: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Read the reference answer of a row (`answer`), or all of them (`answers`)."""
    name = "answers" if columns.get("answer") is None and columns.get("answers") is not None else "answer"
    match columns.get(name):
        case []:
            raise RowError(f"wanted at least one answer as `{name}`, got {short(columns[name])}")
        case [*values]:
            return tuple(answer_of(value, f"{name}[{i}]") for i, value in enumerate(values))
        case value:
            return answer_of(value, name)


def answer_of(value: Any, name: str) -> str:
    """Convert a text, number or boolean (yes, no) to a text."""
    if value is True or value is False:
        return "yes" if value else "no"
    return str(value) if is_number(value) else text(value, name)
