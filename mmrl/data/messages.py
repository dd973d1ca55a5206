"""Messages in the chat form of transformers and TRL, and prompts of them, with images and videos."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmrl.core.types import Media, Message, Part, Prompt
from mmrl.data.fields import RowError, listed, mapping, short

MARKS = re.compile(r"<(image|video)>")  # placeholders for media in texts of datasets
ROLES = ("system", "user", "assistant", "tool")
NAMES = ("path", "url")  # keys of a part that transformers takes besides its kind
Slot = tuple[str, Media | None]  # a place for an image or video, and what a part itself put there
# Makes a medium of its kind ("image", "video"), of what names or is one, and of its place in errors.
ReadMedia = Callable[[str, Any, str], Media]


def no_media(kind: str, value: Any, place: str) -> Media:
    """Refuse an image or a video: for models that read text only."""
    raise RowError(f"this model reads text only, but {place} is given; leave it out")


def prompt_of(
    uid: str,
    asked: Any,
    images: Sequence[Any] = (),
    videos: Sequence[Any] = (),
    *,
    read: ReadMedia = no_media,
) -> Prompt:
    """Make a prompt of a text or messages (see `read_messages`) and of the images and videos for it.

    Raises RowError for messages that end with an answer as well.
    """
    media = [
        read(kind, value, f"{kind} {i + 1} of '{uid}'")
        for kind, values in (("image", images), ("video", videos))
        for i, value in enumerate(values)
    ]
    messages = read_messages(asked, media, read)
    if messages[-1].role == "assistant":
        raise RowError(f"wanted messages that end with a question in '{uid}', got an answer at their end")
    return Prompt(uid, messages)


def read_messages(
    value: Any, media: Sequence[Media], medium: ReadMedia, name: str = "prompt"
) -> tuple[Message, ...]:
    """Read a prompt, a text or messages, and put media into the places of its messages.

    A place is a part `{"type": "image"}` or a mark <image> in a text, likewise of videos. Without places the
    media come first in the user's first message, as in TRL.

    Args:
        value: A text, which is one message of the user, or messages of `role` and `content`: a text, or parts
            of the `type` text, image or video. A part may hold its image or video itself.
        media: The images and videos of the row's columns; those of one kind fill their places in order.
        medium: Makes the medium that a part holds itself.
        name: The column, for errors.

    Raises RowError for a prompt without a message of the user, and where places and media do not agree.
    """
    turns = [{"role": "user", "content": value}] if type(value) is str else listed(value, name)
    read = []
    for i, turn in enumerate(turns):
        place = f"{name}[{i}]"
        role = mapping(turn, place).get("role") or "user"
        if role not in ROLES:
            raise RowError(f"wanted {', '.join(ROLES)} as the role of `{place}`, got {short(role)}")
        read.append((role, *_flat(turn.get("content"), f"{place}.content", medium)))
    first = next((i for i, (role, *_) in enumerate(read) if role == "user"), None)
    if first is None or not any(words.strip() for _, words, _ in read):
        raise RowError(f"wanted a `{name}` with a turn of the user, got {short(value)}")
    if not any(own is None for _, _, slots in read for _, own in slots):
        role, words, slots = read[first]
        marks = "".join(f"<{medium.kind}>" for medium in media)
        read[first] = (role, marks + words, [*((m.kind, None) for m in media), *slots])
    return _filled(read, media)


def _flat(content: Any, name: str, medium: ReadMedia) -> tuple[str, list[Slot]]:
    """Write the parts of a message as one text with marks, and list its places."""
    match content:
        case str():
            return content, [(kind, None) for kind in MARKS.findall(content)]
        case {"type": "text", "text": str(words)}:
            return words, [(kind, None) for kind in MARKS.findall(words)]
        case {"type": ("image" | "video") as kind, **rest}:
            # Rows of parquet have every key that a part of any row has, most of them null.
            payload = {key: item for key, item in rest.items() if item is not None and key != "text"}
            if payload.keys() <= {kind, *NAMES} and len(payload) <= 1:
                own = [medium(kind, item, f"{name}.{kind}") for item in payload.values()]
                return f"<{kind}>", [(kind, own[0] if own else None)]
        case [*parts]:
            flat = [
                _flat(part, f"{name}[{i}]", medium) for i, part in enumerate(parts) if type(part) is not str
            ]
            if len(flat) == len(parts):
                return "".join(words for words, _ in flat), [slot for _, slots in flat for slot in slots]
    raise RowError(
        f"wanted a text, or parts of the types text, image and video as `{name}`, got {short(content)}"
    )


def _filled(read: Iterable[tuple[str, str, list[Slot]]], media: Sequence[Media]) -> tuple[Message, ...]:
    """Put media into places: the next one of the place's kind."""
    left = {kind: [medium for medium in media if medium.kind == kind] for kind in ("image", "video")}
    wanted = {kind: 0 for kind in left}
    messages = []
    for role, words, slots in read:
        here = []
        for kind, own in slots:
            wanted[kind] += own is None
            here += [own] if own is not None else left[kind][wanted[kind] - 1 : wanted[kind]]
        if len(here) == len(slots):
            messages.append(Message(role, interleaved(words, here)))
    for kind, held in left.items():
        if wanted[kind] != len(held):
            raise RowError(f"the messages have {wanted[kind]} {kind} places, but {len(held)} are given")
    return tuple(messages)


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
    # With one group in the pattern, `re.split` alternates between texts and marks.
    parts = [Part(media=next(left)) if i % 2 else Part(piece) for i, piece in enumerate(MARKS.split(words))]
    return tuple(part for part in parts if part.media or part.text.strip())


def answer_text(value: Any, name: str) -> str:
    """Read an answer: a text, a message, its parts, or the last of several messages."""
    match value:
        case (str() as words) | {"type": "text", "text": str(words)}:
            return words
        case {"type": "image", **rest} if all(value is None for value in rest.values()):  # a placeholder
            return "<image>"
        case {"content": content}:
            return answer_text(content, f"{name}.content")
        case [{"type": _}, *_] as parts:  # messages have a `role`, and no `type`
            return "".join(answer_text(part, name) for part in parts)
        case [*_, last]:
            return answer_text(last, name)
    raise RowError(f"wanted a text, a message, messages or parts as `{name}`, got {short(value)}")
