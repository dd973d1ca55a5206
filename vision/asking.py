"""Prompts about pictures, and ready-made answers to them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.rows import RowError
from mmrl.types import Media, Message, Outcome, Part, Prompt
from mmrl.vision.media import MediaRoot
from mmrl.vision.video import MediaError

MARKS = re.compile(r"<(image|video)>")  # where a text wants its media
log = logging.getLogger("mmrl")


def ask(uid: str, media: Sequence[Media], text: str, target: Any, columns: Mapping[str, Any]) -> Prompt:
    """Show media, then ask."""
    message = Message("user", (*(Part(media=one) for one in media), Part(text)))
    return Prompt(uid, (message,), target, columns=columns)


def require(root: MediaRoot, names: Iterable[tuple[str, str]], source: str) -> None:
    """Refuse a data set of which media are missing; `names` are places and media paths. Names every one, the
    first ten in words."""
    missing = []
    for place, name in names:
        try:
            root.locate(name)
        except MediaError as error:
            missing.append(f"{place}: {error}")
    if missing:
        shown = "\n  ".join(missing[:10])
        raise MediaError(f"{len(missing)} media of '{source}' cannot be used:\n  {shown}")


def distinct(prompts: Sequence[Prompt], source: str) -> list[Prompt]:
    """Refuse two prompts of one id, and a data set without any."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.uid in seen:
            raise ValueError(f"'{source}' has two rows with the id '{prompt.uid}'")
        seen.add(prompt.uid)
    if not prompts:
        raise ValueError(f"'{source}' holds no row that can be used")
    return list(prompts)


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


def interleaved(text: str, media: Sequence[Media]) -> tuple[Part, ...]:
    """Put media where a text marks them with <image> and <video>, or all before it where it marks none."""
    marks = MARKS.findall(text)
    if not marks:
        return (*(Part(media=one) for one in media), Part(text))
    if marks != [one.kind for one in media]:
        held = ", ".join(one.kind for one in media) or "nothing"
        raise RowError(f"the text marks {', '.join(marks)}, but the row holds {held}")
    left = iter(media)
    parts = [Part(media=next(left)) if i % 2 else Part(piece) for i, piece in enumerate(MARKS.split(text))]
    return tuple(part for part in parts if part.media or part.text.strip())
