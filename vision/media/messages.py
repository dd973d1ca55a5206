"""Messages of rows in the chat form of transformers and TRL, with places for images and videos."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmrl.core.types import Media, Message
from mmrl.data.fields import RowError, listed, mapping, short
from mmrl.vision.media.media_root import MediaRef, media_refs
from mmrl.vision.media.prompts import MARKS, interleaved

ROLES = ("system", "user", "assistant")
Slot = tuple[str, Media | None]  # a place for an image or video, and what a part itself put there


def read_messages(
    value: Any, media: Sequence[Media], medium: Callable[[MediaRef], Media], name: str = "prompt"
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


def _flat(content: Any, name: str, medium: Callable[[MediaRef], Media]) -> tuple[str, list[Slot]]:
    """Write the parts of a message as one text with marks, and list its places."""
    match content:
        case str():
            return content, [(kind, None) for kind in MARKS.findall(content)]
        case {"type": "text", "text": str(words)}:
            return words, [(kind, None) for kind in MARKS.findall(words)]
        case {"type": ("image" | "video") as kind, **rest}:
            # Rows of parquet have every key that a part of any row has, most of them null.
            payload = {key: item for key, item in rest.items() if item is not None and key != "text"}
            if payload.keys() <= {kind}:
                own = [medium(ref) for ref in media_refs(payload.get(kind), kind, f"{name}.{kind}")]
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
            raise RowError(f"the messages have {wanted[kind]} {kind} places, but the row holds {len(held)}")
    return tuple(messages)


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
