"""Conversion of data rows between mmrl, verl, ms-swift and LLaMA-Factory.

A row of mmrl has `question` (or `messages` for several turns), `system`, `answer`, or `chosen` and
`rejected`, or an answer with a `label` (true or false), and `images` and `videos`. Media without a mark
<image> or <video> in the text come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.data.fields import RowError, listed, mapping, short, text
from mmrl.vision.media.prompts import answer_of, answers_of

MARK = re.compile(r"<(image|video)>")
LEADING = re.compile(r"^(?:\s*<(?:image|video)>)+\n?")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MEDIA = ("images", "videos")
Row = Mapping[str, Any]


def from_verl(row: Row) -> dict[str, Any]:
    """Convert a row of verl to mmrl.

    Columns: `prompt` (messages), `reward_model` with `ground_truth`, `images`, `videos`, `data_source`,
    `ability`, `extra_info`.
    """
    ours = _from_chat(row, row.get("prompt"))
    rule = {} if row.get("reward_model") is None else mapping(row["reward_model"], "reward_model")
    if rule.get("ground_truth") is not None:
        ours["answer"] = _answer({"answer": rule["ground_truth"]})
    return ours | _rest(row, ("prompt", "reward_model"))


def to_verl(row: Row, *, data_source: str = "mmrl", ability: str = "visual_qa") -> dict[str, Any]:
    """Convert a row of mmrl to verl; the answer becomes the ground truth of a rule-based reward."""
    if row.get("answer", row.get("answers")) is None:
        raise RowError("verl checks answers, but the row has no `answer`")
    extra = row.get("extra_info")
    kept = {key: row[key] for key in ("id", "chosen", "rejected") if row.get(key) is not None}
    return {
        "data_source": row.get("data_source") or data_source,
        "prompt": _chat(row),
        **_media(row),
        "ability": row.get("ability") or ability,
        "reward_model": {"style": "rule", "ground_truth": _answer(row)},
        "extra_info": {**({} if extra is None else mapping(extra, "extra_info")), **kept},
    }


def from_ms_swift(row: Row) -> dict[str, Any]:
    """Convert a row of ms-swift to mmrl.

    Columns: `messages`, `rejected_response` or `rejected_messages`, `label`, `images`, `videos`; or the older
    `query`, `response`, `history` and `system`.
    """
    chat = row.get("messages")
    if chat is None and "query" in row:
        chat = _turns(row, row["query"], row.get("response"))
    ours = _from_chat(row, chat)
    rejected = row.get("rejected_response")
    if rejected is None and row.get("rejected_messages"):
        rejected = _text_of(listed(row["rejected_messages"], "rejected_messages")[-1])[0]
    if rejected is not None:
        ours |= {"chosen": ours.pop("answer", ""), "rejected": text(rejected, "rejected_response")}
    if row.get("solution") is not None:
        ours["answer"] = _answer({"answer": row["solution"]})
    converted = (
        "messages",
        "query",
        "response",
        "history",
        "rejected_response",
        "rejected_messages",
        "solution",
    )
    return ours | _rest(row, converted)


def to_ms_swift(row: Row) -> dict[str, Any]:
    """Convert a row of mmrl to ms-swift; the answer ends the messages and is `solution` for its rewards."""
    answer = row.get("chosen", row.get("answer", _first(row.get("answers"))))
    final = [] if answer is None else [{"role": "assistant", "content": _as_text(answer)}]
    written: dict[str, Any] = {"messages": [*_chat(row), *final], **_media(row)}
    if row.get("rejected") is not None:
        written["rejected_response"] = _as_text(row["rejected"])
    elif answer is not None:
        written["solution"] = _as_text(answer)
    return written | {key: row[key] for key in ("id", "label") if row.get(key) is not None}


def from_llama_factory(row: Row) -> dict[str, Any]:
    """Convert a row of LLaMA-Factory to mmrl.

    Columns: `conversations` or `messages`, or `instruction`, `input`, `output`, `history` and `system`; with
    `chosen` and `rejected`, `kto_tag`, `images`, `videos`.
    """
    chat = row.get("conversations", row.get("messages"))
    if chat is None:
        if type(row.get("instruction")) is not str:
            raise RowError("wanted conversations, messages or an instruction")
        parts = [row.get(name) for name in ("instruction", "input") if row.get(name) not in (None, "")]
        chat = _turns(row, "\n".join(text(part, "input") for part in parts), row.get("output"))
    ours = _from_chat(row, chat)
    for name in ("chosen", "rejected"):
        if row.get(name) is not None:
            ours[name] = _text_of(row[name])[0]
    if row.get("kto_tag") is not None:
        ours["label"] = row["kto_tag"]
    converted = ("conversations", "messages", "instruction", "input", "output", "history", "kto_tag")
    return ours | _rest(row, (*converted, "chosen", "rejected"))


def to_llama_factory(row: Row) -> dict[str, Any]:
    """Convert a row of mmrl to LLaMA-Factory's OpenAI form; see `describe_llama_factory`."""
    written: dict[str, Any] = {"messages": _chat(row), **_media(row)}
    if row.get("rejected") is not None:
        for name in ("chosen", "rejected"):
            written[name] = {"role": "assistant", "content": _as_text(row.get(name, ""))}
        return written
    answer = row.get("answer", _first(row.get("answers")))
    if answer is None:
        raise RowError("LLaMA-Factory learns from answers, but the row has none")
    written["messages"].append({"role": "assistant", "content": _as_text(answer)})
    return written | ({"kto_tag": row["label"]} if type(row.get("label")) is bool else {})


def describe_llama_factory(columns: Sequence[str], file_name: str) -> dict[str, Any]:
    """Return the entry of LLaMA-Factory's `dataset_info.json` for a file with these columns."""
    known = ("messages", "images", "videos", "chosen", "rejected", "kto_tag")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    return {
        "file_name": file_name,
        "formatting": "sharegpt",
        **({"ranking": True} if "rejected" in columns else {}),
        "columns": {name: name for name in known if name in columns},
        "tags": {**tags, "system_tag": "system"},
    }


def _turns(row: Row, asked: Any, answer: Any) -> list[dict[str, Any]]:
    """Convert the pairs of `history`, the final question and its answer to messages."""
    pairs = [] if row.get("history") is None else listed(row["history"], "history")
    turns = [turn for pair in pairs for turn in listed(pair, "history", 2)] + [asked, answer]
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns) if turn is not None]


def _from_chat(row: Row, chat: Any) -> dict[str, Any]:
    """Split a conversation into question, answer, system prompt and media."""
    if type(chat) is not list or not chat:
        raise RowError(f"wanted a list of messages, got {str(chat)[:60]!r}")
    turns: list[tuple[str, str]] = []
    inside: dict[str, list[Any]] = {name: [] for name in MEDIA}
    for message in chat:
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        if type(role) is not str or role not in ROLES:
            known = ", ".join(ROLES)
            raise RowError(f"cannot convert a message of the role {short(role)}; known are {known}")
        words, media = _text_of(message)
        turns.append((ROLES[role], words))
        for name in MEDIA:
            inside[name] += media[name]
    ours: dict[str, Any] = {}
    system = row.get("system") or (turns.pop(0)[1] if turns[0][0] == "system" else "")
    if system:
        ours["system"] = text(system, "system")
    answer = turns.pop()[1] if turns and turns[-1][0] == "assistant" else None
    media = {name: _listed(row.get(name)) + inside[name] for name in MEDIA}
    if len(turns) == 1 and turns[0][0] == "user":
        asked = turns[0][1]
        leading, marks = LEADING.match(asked), len(MARK.findall(asked))
        # Marks that all precede the text carry no information: media without a mark come first anyway.
        if leading and marks == sum(map(len, media.values())) == len(MARK.findall(leading[0])):
            asked = asked[leading.end() :]
        ours["question"] = asked
    elif turns:
        ours["messages"] = [{"role": role, "content": content} for role, content in turns]
    else:
        raise RowError("its messages ask nothing")
    if answer is not None:
        ours["answer"] = answer
    return ours | {name: files for name, files in media.items() if files}


def _text_of(message: Any) -> tuple[str, dict[str, list[Any]]]:
    """Return the text of a message, with marks, and the media among its parts."""
    media: dict[str, list[Any]] = {name: [] for name in MEDIA}
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else message
    match content:
        case str():
            return content, media
        case [*parts]:
            words = []
            for part in parts:
                match part:
                    case {"type": "text", "text": str(piece)} | str(piece):
                        words.append(piece)
                    case {"type": "image" | "video" as kind, **rest}:
                        words.append(f"<{kind}>")
                        media[f"{kind}s"] += _listed(rest.get(kind))
                    case _:
                        raise RowError(f"cannot convert the part {str(part)[:60]!r} of a message")
            return "".join(words), media
    raise RowError(f"wanted a text or parts as the content of a message, got {short(content)}")


def _chat(row: Row) -> list[dict[str, str]]:
    """Return the question as messages, with a mark for every medium."""
    match row:
        case {"messages": [*asked]} | {"prompt": [*asked]} if asked:
            pass
        case _:
            asked = [{"role": "user", "content": row.get("question") or row.get("prompt") or ""}]
    chat = [
        {"role": text(mapping(turn, "message").get("role"), "role"), "content": _text_of(turn)[0]}
        for turn in asked
    ]
    first = next((turn for turn in chat if turn["role"] == "user"), None)
    if first is None or not first["content"].strip():
        raise RowError("the row has no `question` and no message of a user")
    if not any(MARK.search(turn["content"]) for turn in chat):
        media = _media(row)
        marks = "<image>" * len(media.get("images", ())) + "<video>" * len(media.get("videos", ()))
        first["content"] = marks + first["content"]
    system = [{"role": "system", "content": text(row["system"], "system")}] if row.get("system") else []
    return system + chat


def _media(row: Row) -> dict[str, list[Any]]:
    media = {name: _listed(row.get(name)) + _listed(row.get(name[:-1])) for name in MEDIA}
    return {name: files for name, files in media.items() if files}


def _listed(value: Any) -> list[Any]:
    match value:
        case None:
            return []
        case [*values]:
            return list(values)
    return [value]


def _answer(row: Row) -> str | list[str]:
    answer = answers_of(row)
    return answer if type(answer) is str else list(answer)


def _as_text(answer: Any) -> str:
    """Convert an answer to text: a text, a number, or the first of several."""
    if isinstance(answer, Mapping | list) and answer:
        return _text_of(_first(answer))[0]
    return answer_of(answer, "answer")


def _first(value: Any) -> Any:
    return value[0] if type(value) is list and value else value


def _rest(row: Row, converted: Sequence[str]) -> dict[str, Any]:
    taken = {*converted, *MEDIA, "system"}
    return {key: value for key, value in row.items() if key not in taken and value is not None}


@dataclass(frozen=True)
class RowFormat:
    """Row format of one toolkit: converters to and from mmrl, and the ending of its files."""

    read: Callable[[Row], dict[str, Any]]
    write: Callable[..., dict[str, Any]]
    ending: str


FORMS = {
    "mmrl": RowFormat(lambda row: dict(row) | _media(row), dict, ".jsonl"),
    "verl": RowFormat(from_verl, to_verl, ".parquet"),
    "ms_swift": RowFormat(from_ms_swift, to_ms_swift, ".jsonl"),
    "llama_factory": RowFormat(from_llama_factory, to_llama_factory, ".json"),
}
