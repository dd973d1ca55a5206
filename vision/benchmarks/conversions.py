"""Conversion of data rows between mmrl, verl, ms-swift and LLaMA-Factory.

A row of mmrl has `question` (or `messages` for several turns), `system`, `answer`, or `chosen` and
`rejected`, or an answer with a `label` (true or false), and `images` and `videos`. Media without a mark
<image> or <video> in the text come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mmrl.data.fields import RowError, listed, mapping, short, text
from mmrl.data.messages import MARKS
from mmrl.vision.media.prompts import answer_of, answers_of

LEADING = re.compile(r"^(?:\s*<(?:image|video)>)+\n?")  # first marks, and the line break after them
# The names of ShareGPT (human, gpt) and of OpenAI (user, assistant).
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MEDIA = ("images", "videos")
Row = Mapping[str, Any]
Toolkit = Literal["mmrl", "verl", "ms_swift", "llama_factory"]
SUFFIXES: dict[Toolkit, str] = {
    "mmrl": ".jsonl",
    "verl": ".parquet",
    "ms_swift": ".jsonl",
    "llama_factory": ".json",
}
# The columns of a conversation; without one those of a question, which follows `history`, and of its answer.
CONVERSATIONS = {
    "verl": (("prompt",), (), ""),
    "ms_swift": (("messages",), ("query",), "response"),
    "llama_factory": (("conversations", "messages"), ("instruction", "input"), "output"),
}
# All columns of a toolkit that mmrl names or splits otherwise; others are kept.
CONVERTED = {
    "verl": "prompt reward_model",
    "ms_swift": "messages query response history rejected_response rejected_messages solution",
    "llama_factory": "conversations messages instruction input output history chosen rejected kto_tag",
}


def read_row(row: Row, toolkit: Toolkit) -> dict[str, Any]:
    """Convert a row of a toolkit to mmrl; columns that the conversion does not know are kept."""
    if toolkit == "mmrl":
        ours = dict(row) | _media(row)  # `image` and `video` move into the lists
        return {key: value for key, value in ours.items() if key not in ("image", "video")}
    ours = _from_messages(row, _conversation(row, *CONVERSATIONS[toolkit]))
    answer = None
    match toolkit:
        case "verl":
            rule = {} if row.get("reward_model") is None else mapping(row["reward_model"], "reward_model")
            answer = rule.get("ground_truth")
        case "ms_swift":
            answer, rejected = row.get("solution"), row.get("rejected_response")
            if rejected is None and row.get("rejected_messages"):
                rejected = _text_of(listed(row["rejected_messages"], "rejected_messages")[-1])[0]
            if rejected is not None:
                # The chosen answer of a pair is the last message.
                ours |= {"chosen": ours.pop("answer", ""), "rejected": text(rejected, "rejected_response")}
        case "llama_factory":
            sides = [side for side in ("chosen", "rejected") if row.get(side) is not None]
            ours |= {side: _text_of(row[side])[0] for side in sides}
            if row.get("kto_tag") is not None:  # of KTO: whether the one answer is desirable
                ours["label"] = row["kto_tag"]
    if answer is not None:
        ours["answer"] = answers_of({"answer": answer})  # what a rule checks wins over the last message
    converted = {*CONVERTED[toolkit].split(), *MEDIA, "image", "video", "system"}
    return ours | {key: value for key, value in row.items() if key not in converted and value is not None}


def write_row(row: Row, toolkit: Toolkit) -> dict[str, Any]:
    """Convert a row of mmrl to a toolkit; for LLaMA-Factory in OpenAI's form (see `describe_llama_factory`).

    The answer becomes the ground truth of a rule-based reward of verl, or the last message. For ms-swift it
    is the `solution` of its rewards, too.
    """
    if toolkit == "mmrl":
        return dict(row)
    messages, rejected = _messages(row), row.get("rejected")
    answer = row.get("answer", _first(row.get("answers")))
    target: dict[str, Any] = {}
    match toolkit:
        case "verl":
            if answer is None:
                raise RowError("verl checks answers, but the row has no `answer`")
            extra = {} if row.get("extra_info") is None else mapping(row["extra_info"], "extra_info")
            kept = {key: row[key] for key in ("id", "chosen", "rejected") if row.get(key) is not None}
            return {
                "data_source": row.get("data_source") or "mmrl",
                "prompt": messages,
                **_media(row),
                "ability": row.get("ability") or "visual_qa",
                "reward_model": {"style": "rule", "ground_truth": answers_of(row)},
                "extra_info": {**extra, **kept},
            }
        case "ms_swift":
            answer = row.get("chosen", answer)
            if answer is not None:
                messages.append(_reply(answer))
                target = {"solution": messages[-1]["content"]}
            if rejected is not None:
                target = {"rejected_response": _reply(rejected)["content"]}
            target |= {key: row[key] for key in ("id", "label") if row.get(key) is not None}
        case "llama_factory" if rejected is not None:
            target = {"chosen": _reply(row.get("chosen", "")), "rejected": _reply(rejected)}
        case "llama_factory":
            if answer is None:
                raise RowError("LLaMA-Factory learns from answers, but the row has none")
            messages.append(_reply(answer))
            target = {"kto_tag": row["label"]} if type(row.get("label")) is bool else {}
    return {"messages": messages, **_media(row), **target}


def describe_llama_factory(columns: Sequence[str], file_name: str) -> dict[str, Any]:
    """Return the entry of LLaMA-Factory's `dataset_info.json` for a file with these columns."""
    known = ("messages", "images", "videos", "chosen", "rejected", "kto_tag")
    roles = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
    return {
        "file_name": file_name,
        "formatting": "sharegpt",  # its name for lists of messages, whatever their keys
        **({"ranking": True} if "rejected" in columns else {}),
        "columns": {name: name for name in known if name in columns},
        "tags": {"role_tag": "role", "content_tag": "content", **roles},  # by default ShareGPT: from, value
    }


def _conversation(row: Row, names: Sequence[str], question: Sequence[str], answer: str) -> list[Any]:
    """Return the messages of a row, or make them from `history`, the question and its answer."""
    conversation = next((row[name] for name in names if row.get(name) is not None), None)
    if conversation is None and question and type(row.get(question[0])) is str:
        # `history` is [[question, answer], ...].
        pairs = [] if row.get("history") is None else listed(row["history"], "history")
        texts = [text(row[name], name) for name in question if row.get(name) not in (None, "")]
        turns = [turn for pair in pairs for turn in listed(pair, "history", 2)]
        turns += ["\n".join(texts), row.get(answer)]  # None where the answer is still to be given
        roles = ("user", "assistant")
        conversation = [
            {"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns) if turn is not None
        ]
    if type(conversation) is not list or not conversation:
        wanted = " or ".join((*names, *question[:1]))
        raise RowError(f"wanted a list of messages, as {wanted}, got {short(conversation)}")
    return conversation


def _from_messages(row: Row, conversation: list[Any]) -> dict[str, Any]:
    """Split a conversation into question, answer, system prompt and media."""
    turns: list[tuple[str, str]] = []
    media = {"images": [], "videos": [], **_media(row)}
    for message in conversation:
        message = mapping(message, "message")
        role = message.get("role", message.get("from"))
        if type(role) is not str or role not in ROLES:
            known = ", ".join(ROLES)
            raise RowError(f"cannot convert a message of the role {short(role)}; known are {known}")
        words, parts = _text_of(message)
        turns.append((ROLES[role], words))
        for name in MEDIA:
            media[name] += parts[name]
    ours: dict[str, Any] = {}
    if system := row.get("system") or (turns.pop(0)[1] if turns[0][0] == "system" else ""):
        ours["system"] = text(system, "system")
    # Without an assistant at the end, the answer is in another column or unknown.
    answer = turns.pop()[1] if turns and turns[-1][0] == "assistant" else None
    match turns:
        case []:
            raise RowError("its messages ask nothing")
        case [("user", asked)]:
            leading, marks = LEADING.match(asked), len(MARKS.findall(asked))
            # Marks that all precede the text carry no information: media without a mark come first anyway.
            if leading and marks == sum(map(len, media.values())) == len(MARKS.findall(leading[0])):
                asked = asked[leading.end() :]
            ours["question"] = asked
        case _:
            ours["messages"] = [{"role": role, "content": content} for role, content in turns]
    if answer is not None:
        ours["answer"] = answer
    return ours | {name: files for name, files in media.items() if files}


def _text_of(message: Any) -> tuple[str, dict[str, list[Any]]]:
    """Return the text of a message, with marks, and the media among its parts."""
    media: dict[str, list[Any]] = {"images": [], "videos": []}
    content, words = message, []
    match message:
        case {**fields}:
            content = fields.get("content", fields.get("value"))
    for part in [None] if content is None else _listed(content):  # null is no part, and an error below
        match part:
            case {"type": "text", "text": str(piece)} | str(piece):
                words.append(piece)
            case {"type": "image" | "video" as kind, **rest}:
                words.append(f"<{kind}>")
                media[f"{kind}s"] += _listed(rest.get(kind))
            case _:
                raise RowError(f"wanted a text or parts as the content of a message, got {short(part)}")
    return "".join(words), media


def _messages(row: Row) -> list[dict[str, str]]:
    """Return the question as messages, with a mark for every medium."""
    match row:
        case {"messages": [*asked]} | {"prompt": [*asked]} if asked:
            pass
        case _:
            asked = [{"role": "user", "content": row.get("question") or row.get("prompt") or ""}]
    messages = [
        {"role": text(mapping(turn, "message").get("role"), "role"), "content": _text_of(turn)[0]}
        for turn in asked
    ]
    first = next((turn for turn in messages if turn["role"] == "user"), None)
    if first is None or not first["content"].strip():
        raise RowError("the row has no `question` and no message of a user")
    if not any(MARKS.search(turn["content"]) for turn in messages):  # other toolkits need one for every file
        media = _media(row)
        marks = "<image>" * len(media.get("images", ())) + "<video>" * len(media.get("videos", ()))
        first["content"] = marks + first["content"]
    system = [{"role": "system", "content": text(row["system"], "system")}] if row.get("system") else []
    return system + messages


def _reply(answer: Any) -> dict[str, str]:
    """Make the message of an answer: a message, a text, a number, or the first of several."""
    match _first(answer):
        case {**message}:
            content = _text_of(message)[0]
        case value:
            content = answer_of(value, "answer")
    return {"role": "assistant", "content": content}


def _first(value: Any) -> Any:
    """Return the first of several answers, or a single one."""
    match value:
        case [first, *_]:
            return first
    return value


def _media(row: Row) -> dict[str, list[Any]]:
    media = {name: _listed(row.get(name)) + _listed(row.get(name[:-1])) for name in MEDIA}
    return {name: files for name, files in media.items() if files}


def _listed(value: Any) -> list[Any]:
    match value:
        case None:
            return []
        case [*values]:
            return values
    return [value]
