"""Readers of chat messages with images, videos and sounds, in the format of transformers and TRL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmrl.core.modalities import MODALITIES, media_marks
from mmrl.core.tool_calls import ARGUMENTS, call_of
from mmrl.core.types import Media, Message, Part, Prompt
from mmrl.data.fields import RowError, listed, mapping, parse_json, plain, short, text, unpacked
from mmrl.data.row_fields import has_content

ROLES = ("system", "user", "assistant", "tool")
READ = ("role", "content")  # keys of a message that are parsed
# Keys of a message that chat templates read.
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
NEUTRAL = {"weight": 1, "loss": True}  # keys that weight a turn's loss, allowed only with these values
CALL = ("id", "type", "index", "function")  # allowed keys of a tool call, besides the keys of its function
ASKED = ("prompt", "question")  # columns that may hold the question, tried before `messages`
NAMES = ("path", "url")  # keys of a message part for its file, besides the kind (`image`)
Slot = tuple[str, Media | None]  # kind of a placeholder; medium, if the part contains it
# Creates a medium from its kind, its value in the row, and its name for errors.
ReadMedia = Callable[[str, Any, str], Media]


def no_media(kind: str, value: Any, place: str) -> Media:
    """Raise `RowError` for any medium; this is the `ReadMedia` function for models that read only text."""
    raise RowError(f"this model reads text only, but {place} is given; leave it out")


def prompt_of(
    uid: str,
    asked: Any,
    given: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    *,
    read: ReadMedia = no_media,
) -> Prompt:
    """Create a prompt from a text or messages (see `read_messages`) and from media, keyed by their kind.

    Raises `RowError` for messages that end with an answer.
    """
    media = [
        read(kind, value, f"{kind} {i + 1} of '{uid}'")
        for kind, values in given.items()
        for i, value in enumerate(values)
    ]
    messages = read_messages(asked, media, read)
    if messages[-1].role == "assistant":
        raise RowError(f"wanted messages that end with a question in '{uid}', got an answer at their end")
    return Prompt(uid, messages)


def read_messages(
    value: Any, media: Sequence[Media], medium: ReadMedia, name: str = "prompt"
) -> tuple[Message, ...]:
    """Read a prompt (a text or messages), and insert media at the placeholders in its messages.

    A placeholder is a part `{"type": "image"}` or a mark <image> in a text, and likewise for videos and
    sounds. Without placeholders, the media come first in the first user message, as in TRL. Raises `RowError`
    for a prompt without a user message, and if the numbers of placeholders and media differ.

    Args:
        value: A text, which is one user message, or messages with `role` and `content`. The content is a
            text, or parts of the `type` text, image or video. A part can contain its image or video.
        media: The images and videos of the row's columns, in the order of the placeholders of their kind.
        medium: Creates the medium that a part contains.
        name: Name of the column, for errors.
    """
    read = []
    for i, turn in enumerate(as_turns(value, name)):
        place = f"{name}[{i}]"
        role = mapping(turn, place).get("role") or "user"
        if role not in ROLES:
            raise RowError(f"wanted {', '.join(ROLES)} as the role of `{place}`, got {short(role)}")
        extra = kept_keys(turn, place)
        content = "" if extra and turn.get("content") is None else turn.get("content")
        read.append((role, *_flat(content, f"{place}.content", medium), extra))
    first = next((i for i, (role, *_) in enumerate(read) if role == "user"), None)
    if first is None or not any(words.strip() for _, words, *_ in read):
        raise RowError(f"wanted a `{name}` with a turn of the user, got {short(value)}")
    if not any(own is None for _, _, slots, _ in read for _, own in slots):
        role, words, slots, extra = read[first]
        marks = "".join(f"<{medium.kind}>" for medium in media)
        read[first] = (role, marks + words, [*((m.kind, None) for m in media), *slots], extra)
    return _filled(read, media)


def kept_keys(turn: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keys of a message that chat templates read, without its role and content.

    Raises `RowError` for an unknown key with content, and for malformed tool calls.
    """
    keys = {name: value for name, value in turn.items() if has_content(value) and name not in READ}
    for name, value in keys.items():
        if name not in KEPT and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise RowError(f"nothing reads the key `{name}` of `{place}`, {short(value)}; leave it out")
    keys = {name: plain(value, f"{place}.{name}") for name, value in keys.items() if name in KEPT}
    if "tool_calls" in keys:
        keys["tool_calls"] = _calls(keys["tool_calls"], f"{place}.tool_calls")
    return keys


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Convert tool calls to OpenAI's form, with arguments as an object; JSON texts are parsed."""
    try:
        value = parse_json(value) if isinstance(value, str) else value
        calls = [without_null(mapping(call, f"{name}[{i}]")) for i, call in enumerate(listed(value, name))]
        read = [call_of(call) for call in calls]
    except ValueError as error:
        raise RowError(f"cannot read `{name}`, {short(value)}: {error}") from error
    written = []
    for call, parsed in zip(calls, read, strict=True):
        flat = "function" not in call  # name and arguments are keys of the call itself
        if extra := set(call) - {*CALL, *(("name", *ARGUMENTS) if flat else ())}:
            raise RowError(f"nothing reads the key `{min(extra)}` of `{name}`; leave it out")
        function = {"name": parsed.name, "arguments": dict(parsed.arguments)}
        own = {"id": call["id"]} if "id" in call else {}
        written.append({**own, "type": "function", "function": function})
    return written


def without_null(value: Any) -> Any:
    """Drop keys whose value is null, because parquet fills every row with the keys of all rows."""
    match value:
        case Mapping():
            return {key: without_null(inner) for key, inner in value.items() if inner is not None}
        case list() | tuple():
            return [without_null(inner) for inner in value]
    return value


def plain_part(part: Any) -> Any:
    """Convert a part of OpenAI's types `image_url`, `video_url` and `input_audio`; keep other parts."""
    match part:
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            return {"type": "audio", "audio": f"data:audio/{form};base64,{data}"}
        case {"type": str(kind), **rest} if kind in {f"{known}_url" for known in MODALITIES}:
            keys = {key: item for key, item in rest.items() if item is not None and key != "text"}
            address, own = keys.pop(kind, None), kind.removesuffix("_url")
            address = address.get("url") if isinstance(address, Mapping) else address
            if isinstance(address, str) and not keys:
                return {"type": own, own: address}
    return part


def _flat(content: Any, name: str, medium: ReadMedia) -> tuple[str, list[Slot]]:
    """Join the parts of a message to one text with media marks, and list its media placeholders."""
    content = plain_part(content)
    match content:
        case str():
            return content, [(kind, None) for kind in media_marks().findall(content)]
        case {"type": "text", "text": str(words), **rest} if not has_content(rest):
            return words, [(kind, None) for kind in media_marks().findall(words)]
        case {"type": str(kind), **rest} if kind in MODALITIES:
            # Parquet fills each part with the keys of all parts; most values are null.
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
    *first, last = ("text", *MODALITIES)
    types = f"{', '.join(first)} and {last}"
    raise RowError(f"wanted a text, or parts of the types {types} as `{name}`, got {short(content)}")


def _filled(
    read: Iterable[tuple[str, str, list[Slot], dict[str, Any]]], media: Sequence[Media]
) -> tuple[Message, ...]:
    """Create messages; a placeholder without a medium gets the next one of its kind from `media`."""
    left = {kind: [medium for medium in media if medium.kind == kind] for kind in MODALITIES}
    wanted = {kind: 0 for kind in left}
    messages = []
    for role, words, slots, extra in read:
        filled = []
        for kind, own in slots:
            wanted[kind] += own is None
            filled += [own] if own is not None else left[kind][wanted[kind] - 1 : wanted[kind]]
        if len(filled) == len(slots):
            written = json.dumps(extra, ensure_ascii=False) if extra else ""
            messages.append(Message(role, interleaved(words, filled), written))
    for kind, of_kind in left.items():
        if wanted[kind] != len(of_kind):
            raise RowError(f"the messages have {wanted[kind]} {kind} places, but {len(of_kind)} are given")
    return tuple(messages)


def interleaved(words: str, media: Sequence[Media]) -> tuple[Part, ...]:
    """Insert media at the marks of a text, such as <image>; without marks, media come first."""
    marks = media_marks().findall(words)
    if not marks:
        return (*(Part(media=medium) for medium in media), Part(words))
    kinds = [medium.kind for medium in media]
    if marks != kinds:
        raise RowError(
            f"the text marks {', '.join(marks)}, but the row holds {', '.join(kinds) or 'nothing'}"
        )
    left = iter(media)
    # `re.split` with one group returns texts and marks in alternation.
    pieces = enumerate(media_marks().split(words))
    parts = [Part(media=next(left)) if i % 2 else Part(piece) for i, piece in pieces]
    return tuple(part for part in parts if part.media or part.text.strip())


def asked_of(fields: Mapping[str, Any]) -> Any:
    """Return the question of a row, from the columns `prompt`, `question` or `messages`, and `system`.

    `messages` may end with one answer. Raises `RowError` if the columns contradict each other.
    """
    talks: dict[str, Any] = {name: spoken(fields[name]) for name in (*ASKED, "messages") if name in fields}
    fields = {**fields, **talks}
    query = next((fields[name] for name in ASKED if has_content(fields.get(name))), fields.get("prompt"))
    if any(has_content(fields.get(name)) and fields[name] != query for name in ASKED):
        raise RowError(f"the row asks in {' and '.join(ASKED)}, and not the same; keep one of them")
    messages: Any = fields.get("messages")
    if has_content(messages):
        if has_content(query):
            before = as_turns(query, "prompt")
            rest = listed(messages, "messages")[len(before) :]
            answers = all(mapping(turn, "message").get("role") == "assistant" for turn in rest)
            same = same_words(before, messages[: len(before)]) and len(rest) <= 1 and answers
            if not same or holds_media(before) and not holds_media(messages):
                raise RowError(f"the prompt, {short(query)}, is not the one of `messages`; keep one of them")
        query = messages
    if not has_content(fields.get("system")):
        return query
    system, turns = text(fields["system"], "system"), as_turns(query, "prompt")
    if not turns or mapping(turns[0], "prompt[0]").get("role") != "system":
        return [{"role": "system", "content": system}, *turns]
    if _words(turns[0].get("content")) != system:
        raise RowError(f"the column `system`, {short(system)}, is not the system prompt of the messages")
    return turns


def spoken(value: Any) -> Any:
    """Parse a text that is a JSON list of messages, as in CSV cells; return any other value unchanged."""
    turns = unpacked(value)
    if type(turns) is list and turns and all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        return turns
    return value


def as_turns(value: Any, name: str) -> list[Any]:
    """Return a list of messages; a text becomes one user message."""
    return [{"role": "user", "content": value}] if type(value) is str else listed(value, name)


def same_words(turns: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists of messages have the same roles and texts, ignoring media."""
    texts = [
        [(mapping(turn, "message").get("role"), _words(turn.get("content"))) for turn in side]
        for side in (turns, others)
    ]
    return texts[0] == texts[1]


def holds_media(turns: Sequence[Any]) -> bool:
    """Whether any part of the messages contains a medium itself, and not only a placeholder."""
    contents = [turn.get("content") for turn in turns]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    places = ("type", "text")
    return any(
        has_content({key: value for key, value in part.items() if key not in places})
        for part in parts
        if isinstance(part, Mapping)
    )


def _words(content: Any) -> str:
    """Join the texts in the content of a message, without media marks and non-text parts."""
    match content:
        case str():
            return media_marks().sub("", content).strip()
        case {"text": str(words)}:
            return _words(words)
        case [*parts]:
            return "".join(map(_words, parts)).strip()
    return ""


def recorded_turn(value: Any, name: str) -> tuple[str, str]:
    """Read a recorded answer: its text, and its tool calls and thoughts as JSON ("" without any).

    Raises `RowError` as `answer_text` does, and for an empty answer.
    """
    value = turn = spoken(value)
    match value:
        case [{"content": _} | {"role": _} as turn]:
            pass
    beside = kept_keys(turn, name) if isinstance(turn, Mapping) and "type" not in turn else {}
    if not isinstance(turn, Mapping) or not beside:
        return text(answer_text(value, name), name), ""
    words = answer_text({"role": turn.get("role"), "content": turn.get("content")}, name)
    return words, json.dumps(beside, ensure_ascii=False)


def answer_text(value: Any, name: str) -> str:
    """Return the text of a recorded answer: a text, one assistant message, or the parts of a message.

    Raises `RowError` for several messages or answers, for another role, and for tool calls or thoughts beside
    the content (see `recorded_turn`).
    """
    match value:
        case str() as words:
            return words
        case {"type": "text", "text": str(words), **rest} if not has_content(rest):
            return words
        case {"type": "image", **rest} if all(value is None for value in rest.values()):  # a placeholder
            return "<image>"
        case {"content": content}:
            if (role := value.get("role") or "assistant") != "assistant":
                raise RowError(
                    f"wanted words of the assistant as `{name}`, got those of the role {short(role)}"
                )
            if beside := kept_keys(value, name):
                raise RowError(
                    f"an answer is a text, but `{name}` has `{next(iter(beside))}` beside its content; write "
                    "that into the content, in the words in which the model writes it"
                )
            return "" if content is None else answer_text(content, f"{name}.content")
        case [{"type": _}, *_] as parts:  # messages have a `role`, and no `type`
            return "".join(answer_text(part, name) for part in parts)
        case [one]:
            return answer_text(one, name)
        case [_, _, *_]:
            if isinstance(value[-1], Mapping) and value[-1].get("role", "assistant") != "assistant":
                raise RowError(f"`{name}` ends with {short(value[-1])}, which are no words of the assistant")
            kinds = "messages" if isinstance(value[0], Mapping) else "answers"
            raise RowError(
                f"wanted one answer as `{name}`, got {len(value)} {kinds}; move earlier turns into the "
                "prompt, and write a row for each answer"
            )
    raise RowError(f"wanted a text, a message, messages or parts as `{name}`, got {short(value)}")
