"""Rows of other toolkits and ours, into each other: verl, ms-swift, LLaMA-Factory.

Our row holds `question` (or `messages` where there are several turns), `system`, `answer`, or `chosen` and
`rejected`, or an answer with a `label` (true or false), and `images` and `videos`. Media that a text does not
mark with <image> or <video> come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.rows import RowError

MARK = re.compile(r"<(image|video)>")
LEADING = re.compile(r"^(?:\s*<(?:image|video)>)+\n?")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MEDIA = ("images", "videos")
Row = Mapping[str, Any]


def from_verl(row: Row) -> dict[str, Any]:
    """Read a row of verl: `prompt` (messages), `reward_model` with its `ground_truth`, `images`, `videos`,
    `data_source`, `ability`, `extra_info`."""
    ours = _from_chat(row, row.get("prompt"))
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if truth is not None:
        ours["answer"] = truth if type(truth) in (str, list) else str(truth)
    return ours | _rest(row, ("prompt", "reward_model"))


def to_verl(row: Row, *, data_source: str = "mmrl", ability: str = "visual_qa") -> dict[str, Any]:
    """Write a row of verl. An answer becomes the ground truth of a rule."""
    answer = row.get("answer", row.get("answers"))
    if answer is None:
        raise RowError("verl checks answers, but the row has no `answer`")
    kept = {key: row[key] for key in ("id", "chosen", "rejected") if row.get(key) is not None}
    return {
        "data_source": row.get("data_source") or data_source,
        "prompt": _chat(row),
        **_media(row),
        "ability": row.get("ability") or ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {**(row.get("extra_info") or {}), **kept},
    }


def from_ms_swift(row: Row) -> dict[str, Any]:
    """Read a row of ms-swift: `messages`, `rejected_response` or `rejected_messages`, `label`, `images`,
    `videos`; or the older `query`, `response`, `history` and `system`."""
    chat = row.get("messages")
    if chat is None and "query" in row:
        turns = [
            turn
            for pair in row.get("history") or ()
            for turn in zip(("user", "assistant"), pair, strict=True)
        ]
        turns += [("user", row["query"]), ("assistant", row.get("response"))]
        chat = [{"role": role, "content": text} for role, text in turns if text is not None]
    ours = _from_chat(row, chat)
    rejected = row.get("rejected_response")
    if rejected is None and row.get("rejected_messages"):
        rejected = _text_of(row["rejected_messages"][-1])[0]
    if rejected is not None:
        ours |= {"chosen": ours.pop("answer", ""), "rejected": rejected}
    if row.get("solution") is not None:
        ours["answer"] = row["solution"]
    spent = ("messages", "query", "response", "history", "rejected_response", "rejected_messages", "solution")
    return ours | _rest(row, spent)


def to_ms_swift(row: Row) -> dict[str, Any]:
    """Write a row of ms-swift. The answer stands in the messages, and as `solution` for its rewards."""
    answer = row.get("chosen", row.get("answer", _first(row.get("answers"))))
    told = [] if answer is None else [{"role": "assistant", "content": _said(answer)}]
    written: dict[str, Any] = {"messages": [*_chat(row), *told], **_media(row)}
    if row.get("rejected") is not None:
        written["rejected_response"] = _said(row["rejected"])
    elif answer is not None:
        written["solution"] = _said(answer)
    return written | {key: row[key] for key in ("id", "label") if row.get(key) is not None}


def from_llama_factory(row: Row) -> dict[str, Any]:
    """Read a row of LLaMA-Factory: `conversations` or `messages`, or `instruction`, `input`, `output`,
    `history` and `system`; with `chosen` and `rejected`, `kto_tag`, `images`, `videos`."""
    chat = row.get("conversations", row.get("messages"))
    if chat is None:
        if type(row.get("instruction")) is not str:
            raise RowError("wanted conversations, messages or an instruction")
        asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
        turns = [
            turn
            for pair in row.get("history") or ()
            for turn in zip(("user", "assistant"), pair, strict=True)
        ]
        turns += [("user", asked), ("assistant", row.get("output"))]
        chat = [{"role": role, "content": text} for role, text in turns if text is not None]
    ours = _from_chat(row, chat)
    for name in ("chosen", "rejected"):
        if row.get(name) is not None:
            ours[name] = _text_of(row[name])[0]
    if row.get("kto_tag") is not None:
        ours["label"] = row["kto_tag"]
    spent = ("conversations", "messages", "instruction", "input", "output", "history", "kto_tag")
    return ours | _rest(row, (*spent, "chosen", "rejected"))


def to_llama_factory(row: Row) -> dict[str, Any]:
    """Write a row of LLaMA-Factory, in its OpenAI form; `describe_llama_factory` tells it of the columns."""
    written: dict[str, Any] = {"messages": _chat(row), **_media(row)}
    if row.get("rejected") is not None:
        for name in ("chosen", "rejected"):
            written[name] = {"role": "assistant", "content": _said(row.get(name, ""))}
        return written
    answer = row.get("answer", _first(row.get("answers")))
    if answer is None:
        raise RowError("LLaMA-Factory learns from answers, but the row has none")
    written["messages"].append({"role": "assistant", "content": _said(answer)})
    return written | ({"kto_tag": row["label"]} if type(row.get("label")) is bool else {})


def describe_llama_factory(columns: Sequence[str], file_name: str) -> dict[str, Any]:
    """Write the entry of `dataset_info.json` for a file of such rows."""
    known = ("messages", "images", "videos", "chosen", "rejected", "kto_tag")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    return {
        "file_name": file_name,
        "formatting": "sharegpt",
        **({"ranking": True} if "rejected" in columns else {}),
        "columns": {name: name for name in known if name in columns},
        "tags": {**tags, "system_tag": "system"},
    }


def _from_chat(row: Row, chat: Any) -> dict[str, Any]:
    """Part a conversation into what is asked and what is answered, and collect its media."""
    if type(chat) is not list or not chat:
        raise RowError(f"wanted a list of messages, got {str(chat)[:60]!r}")
    said: list[tuple[str, str]] = []
    inside: dict[str, list[Any]] = {name: [] for name in MEDIA}
    for message in chat:
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise RowError(f"cannot convert a message of the role {role!r}; known are {', '.join(ROLES)}")
        text, media = _text_of(message)
        said.append((ROLES[role], text))
        for name in MEDIA:
            inside[name] += media[name]
    ours: dict[str, Any] = {}
    system = row.get("system") or (said.pop(0)[1] if said[0][0] == "system" else "")
    if system:
        ours["system"] = system
    answer = said.pop()[1] if said and said[-1][0] == "assistant" else None
    media = {name: _listed(row.get(name)) + inside[name] for name in MEDIA}
    total = sum(map(len, media.values()))
    if len(said) == 1 and said[0][0] == "user":
        ours["question"] = _unmarked(said[0][1], total)
    elif said:
        ours["messages"] = [{"role": role, "content": text} for role, text in said]
    else:
        raise RowError("its messages ask nothing")
    if answer is not None:
        ours["answer"] = answer
    return ours | {name: found for name, found in media.items() if found}


def _text_of(message: Any) -> tuple[str, dict[str, list[Any]]]:
    """Read a message, of which the content may be parts: its text with marks, and the media in it."""
    media: dict[str, list[Any]] = {name: [] for name in MEDIA}
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else message
    match content:
        case str():
            return content, media
        case [*parts]:
            words = []
            for part in parts:
                match part:
                    case {"type": "text", "text": str(text)} | str(text):
                        words.append(text)
                    case {"type": "image" | "video" as kind, **rest}:
                        words.append(f"<{kind}>")
                        media[f"{kind}s"] += _listed(rest.get(kind))
                    case _:
                        raise RowError(f"cannot convert the part {str(part)[:60]!r} of a message")
            return "".join(words), media
    raise RowError(f"wanted a text or parts as the content of a message, got {content!r}")


def _unmarked(text: str, media: int) -> str:
    """Take marks off a text where all of them stand before it, as they do anyway."""
    leading = LEADING.match(text)
    marks = len(MARK.findall(text))
    return text[leading.end() :] if leading and marks == media == len(MARK.findall(leading[0])) else text


def _chat(row: Row) -> list[dict[str, str]]:
    """Write what is asked as messages, with a mark for every medium."""
    match row:
        case {"messages": [*asked]} | {"prompt": [*asked]} if asked:
            pass
        case _:
            asked = [{"role": "user", "content": row.get("question") or row.get("prompt") or ""}]
    chat = [{"role": one["role"], "content": _text_of(one)[0]} for one in asked]
    first = next((one for one in chat if one["role"] == "user"), None)
    if first is None or not first["content"].strip():
        raise RowError("the row has no `question` and no message of a user")
    if not any(MARK.search(one["content"]) for one in chat):
        media = _media(row)
        marks = "<image>" * len(media.get("images", ())) + "<video>" * len(media.get("videos", ()))
        first["content"] = marks + first["content"]
    return ([{"role": "system", "content": row["system"]}] if row.get("system") else []) + chat


def _media(row: Row) -> dict[str, list[Any]]:
    found = {name: _listed(row.get(name)) + _listed(row.get(name[:-1])) for name in MEDIA}
    return {name: listed for name, listed in found.items() if listed}


def _listed(value: Any) -> list[Any]:
    match value:
        case None:
            return []
        case [*values]:
            return list(values)
    return [value]


def _said(answer: Any) -> str:
    return (
        answer
        if type(answer) is str
        else _text_of(_first(answer))[0]
        if type(answer) is list
        else str(answer)
    )


def _first(value: Any) -> Any:
    return value[0] if type(value) is list and value else value


def _rest(row: Row, spent: Sequence[str]) -> dict[str, Any]:
    taken = {*spent, *MEDIA, "system"}
    return {key: value for key, value in row.items() if key not in taken and value is not None}


@dataclass(frozen=True)
class Form:
    """How rows of one toolkit are read and written, and in what files."""

    read: Callable[[Row], dict[str, Any]]
    write: Callable[..., dict[str, Any]]
    ending: str


def _ours(row: Row) -> dict[str, Any]:
    return dict(row) | _media(row)


FORMS = {
    "mmrl": Form(_ours, dict, ".jsonl"),
    "verl": Form(from_verl, to_verl, ".parquet"),
    "ms_swift": Form(from_ms_swift, to_ms_swift, ".jsonl"),
    "llama_factory": Form(from_llama_factory, to_llama_factory, ".json"),
}
