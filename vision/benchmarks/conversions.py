"""Conversion of data rows between mmrl, verl, ms-swift and LLaMA-Factory.

A row of mmrl has `question` (or `messages` for several turns), and optionally `system`, `images` and
`videos`. Its target is `answer`, or a pair `chosen` and `rejected`, or an answer with a `label` (true or
false). Media without a mark <image> or <video> in the text come before the text. `completion` is a recorded
answer; rules compare it with `answer`. Other columns are copied. Inconvertible content is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

from mmrl.core.modalities import MODALITIES, media_columns, media_marks
from mmrl.data.fields import RowError, listed, mapping, short, text
from mmrl.data.messages import as_turns, asked_of, kept_keys, plain_part
from mmrl.data.row_fields import has_content
from mmrl.vision.media.prompts import answer_of, answers_of, lettered

PLACES = re.compile("<ref-object>|<bbox>")  # placeholders that ms-swift fills from the column `objects`
# Maps the role names of ShareGPT (human, gpt) and of OpenAI (user, assistant) to OpenAI's.
ROLES = {"human": "user", "gpt": "assistant"} | {
    name: name for name in ("user", "assistant", "system", "tool")
}
# Columns of mmrl that have other names or another structure in the other toolkits.
OURS = ("question", "prompt", "messages", "system", "answer", "answers", "completion", "chosen", "rejected")
OURS = (*OURS, "label", "choices")  # `media_columns()` gives the columns of media
Slots = list[tuple[str, Any]]  # (kind, file or None) of every media placeholder in a text
Row = Mapping[str, Any]
Toolkit = Literal["mmrl", "verl", "ms_swift", "llama_factory"]
SUFFIXES: dict[Toolkit, str] = {
    "mmrl": ".jsonl",
    "verl": ".parquet",
    "ms_swift": ".jsonl",
    "llama_factory": ".json",
}
# Other spellings of the toolkits' names, in lower case without blanks, hyphens and underscores.
NAMES: dict[str, Toolkit] = {
    "mmrl": "mmrl",
    **dict.fromkeys(("verl", "volcengineverl"), "verl"),
    **dict.fromkeys(("msswift", "swift", "modelscopemsswift", "modelscopeswift"), "ms_swift"),
    # LLaMA-Factory reads rows of LLaVA and ShareGPT directly.
    **dict.fromkeys(("llamafactory", "hiyougallamafactory", "llava", "sharegpt"), "llama_factory"),
}
# Maps a toolkit to (columns with messages, columns of the question, column of the answer); the last two
# are for rows without messages.
CONVERSATIONS = {
    "verl": (("prompt",), (), ""),
    "ms_swift": (("messages",), ("query",), "response"),
    "llama_factory": (("conversations", "messages"), ("instruction", "input"), "output"),
}
# Maps a toolkit to all its columns that mmrl renames or splits; other columns are copied.
CONVERTED = {
    "verl": "prompt reward_model",
    "ms_swift": "messages query response history rejected_response rejected_messages solution",
    "llama_factory": "conversations messages instruction input output history chosen rejected kto_tag",
}


def toolkit_of(name: str, place: str) -> Toolkit:
    """Return the toolkit for a name in any spelling, such as `ms-swift`; ValueError if it is unknown."""
    if toolkit := NAMES.get(re.sub(r"[\W_]", "", name).lower()):
        return toolkit
    raise ValueError(
        f"`{place}` is '{name}'; wanted mmrl, verl, ms_swift (also ms-swift, swift) or llama_factory (also "
        "LLaMA-Factory, LLaVA, ShareGPT)"
    )


def read_row(row: Row, toolkit: Toolkit) -> dict[str, Any]:
    """Convert a row of a toolkit to mmrl's columns; columns that the toolkit does not define are copied."""
    if toolkit == "mmrl":
        ours = dict(row) | _media(row)  # moves `image` and `video` into the lists `images` and `videos`
        return {key: value for key, value in ours.items() if key not in MODALITIES}
    conversation, used = conversation_of(row, *CONVERSATIONS[toolkit])
    ours = _from_messages(row, conversation)
    answer = row.get("answer")
    match toolkit:
        case "verl":
            rule = dict(mapping(row.get("reward_model") or {}, "reward_model"))
            answer = rule.pop("ground_truth", answer)
            if has_content(rule) and rule != {"style": "rule"}:
                ours["reward_model"] = rule
            used.add("reward_model")
        case "ms_swift":
            used |= {"solution", "rejected_response", "rejected_messages"}
            if has_content(row.get("objects")) and (marks := PLACES.findall(str(conversation))):
                raise RowError(
                    f"its text marks {marks[0]}, which ms-swift fills from `objects` in each model's form; "
                    "write the names and boxes into the text, or read `bbox` by `vision.boxes`"
                )
            answer, rejected = row.get("solution", answer), row.get("rejected_response")
            if rejected is None and row.get("rejected_messages"):
                rejected = _rejected(conversation, listed(row["rejected_messages"], "rejected_messages"))
            if rejected is not None:
                # In pairs, the last message is the chosen answer.
                ours |= {"chosen": ours.pop("answer", ""), "rejected": text(rejected, "rejected_response")}
        case "llama_factory":
            used |= {"chosen", "rejected", "kto_tag"}
            sides = [side for side in ("chosen", "rejected") if row.get(side) is not None]
            ours |= {side: _answer(row[side], side) for side in sides}
            if row.get("kto_tag") is not None:  # label of KTO: whether the only answer is desirable
                ours |= {"label": row["kto_tag"], "completion": ours.pop("answer", "")}
    if answer is not None:
        answer = answers_of({"answer": answer})
        if ours.get("answer", answer) != answer:
            ours["completion"] = ours["answer"]  # the last message is a recorded answer
        ours["answer"] = answer
    converted = set(CONVERTED[toolkit].split())
    if beside := sorted(name for name in converted - used if has_content(row.get(name))):
        raise RowError(f"the row has `{beside[0]}` beside {', '.join(sorted(used))}; keep what is meant")
    converted |= {*media_columns(), "system", "answer"}
    return ours | {key: value for key, value in row.items() if key not in converted and value is not None}


def write_row(row: Row, toolkit: Toolkit) -> dict[str, Any]:
    """Convert a row of mmrl to a toolkit. LLaMA-Factory's messages have OpenAI's format.

    For verl, the answer becomes the ground truth of the rule-based reward. For the other toolkits it becomes
    the last message, and for ms-swift also the `solution` that rewards read. `choices` are appended to the
    question as lines. Other columns are copied, for verl into `extra_info`. See `describe_llama_factory`.
    """
    if toolkit == "mmrl":
        return dict(row)
    messages, media, completion = _messages(row)
    if toolkit == "verl":
        return _for_verl(row, messages, media, completion)
    given = row.get("answer", row.get("answers"))
    answer = None if given is None else _answer(_first(given), "answer")
    sides = {key: _answer(row[key], key) for key in ("chosen", "rejected") if row.get(key) is not None}
    last = sides.get("chosen", answer if completion is None else completion)
    target: dict[str, Any] = {"answers": given} if type(given) in (list, tuple) and len(given) > 1 else {}
    label = row.get("label")
    if toolkit == "ms_swift":
        if last is not None:
            messages.append(_reply(last))
        if "rejected" in sides:
            target["rejected_response"] = sides["rejected"]
        if answer is not None or last is not None and not sides:
            target["solution"] = last if answer is None else answer
    elif "rejected" in sides:
        target |= {"chosen": _reply(sides.get("chosen", "")), "rejected": _reply(sides["rejected"])}
    elif last is None:
        raise RowError("LLaMA-Factory learns from answers, but the row has none")
    else:
        messages.append(_reply(last))
    if toolkit == "llama_factory" and answer not in (None, last, *sides.values()):
        target["answer"] = answer
    if label is not None:
        target["kto_tag" if toolkit == "llama_factory" and type(label) is bool else "label"] = label
    others = _others(row)
    if taken := sorted(set(CONVERTED[toolkit].split()) & set(others)):
        raise RowError(f"the column `{taken[0]}` of the row means something else in {toolkit}; rename it")
    return {"messages": messages, **media, **target, **others}


def _for_verl(row: Row, messages: list[Any], media: Row, completion: str | None) -> dict[str, Any]:
    if row.get("answer", _first(row.get("answers"))) is None:
        raise RowError("verl checks answers, but the row has no `answer`")
    others, kept = _others(row), {key: row.get(key) for key in ("chosen", "rejected", "label")}
    kept["completion"] = completion
    rule, extra = (dict(mapping(others.pop(name, {}), name)) for name in ("reward_model", "extra_info"))
    source, ability = others.pop("data_source", "mmrl"), others.pop("ability", "visual_qa")
    return {
        "data_source": source,
        "prompt": messages,
        **media,
        "ability": ability,
        "reward_model": {"style": "rule", **rule, "ground_truth": answers_of(row)},
        "extra_info": {**extra, **others, **{key: value for key, value in kept.items() if value is not None}},
    }


def _others(row: Row) -> dict[str, Any]:
    ours = (*OURS, *media_columns())
    return {key: value for key, value in row.items() if key not in ours and has_content(value)}


def describe_llama_factory(columns: Sequence[str], file_name: str) -> dict[str, Any]:
    """Return the entry of LLaMA-Factory's `dataset_info.json` for a file with these columns."""
    supported = ("messages", "images", "videos", "audios", "chosen", "rejected", "kto_tag", "tools")
    roles = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
    return {
        "file_name": file_name,
        "formatting": "sharegpt",  # LLaMA-Factory's name for lists of messages, with any keys
        **({"ranking": True} if "rejected" in columns else {}),
        "columns": {name: name for name in supported if name in columns},
        "tags": {"role_tag": "role", "content_tag": "content", **roles},  # default: `from`, `value`
    }


def conversation_of(
    row: Row, names: Sequence[str], question: Sequence[str], answer: str
) -> tuple[list[Any], set[str]]:
    """Return the messages of a row, and the names of the columns that were read.

    Without a column of messages, build the messages from `history`, question and answer.
    """
    used = [name for name in names if has_content(row.get(name))][:1]
    conversation = row[used[0]] if used else None
    if conversation is None and question and type(row.get(question[0])) is str:
        used = [*question, answer, "history"]
        # `history` is [[question, answer], ...].
        pairs = [] if row.get("history") is None else listed(row["history"], "history")
        texts = [text(row[name], name) for name in question if row.get(name) not in (None, "")]
        turns = [turn for pair in pairs for turn in listed(pair, "history", 2)]
        turns += ["\n".join(texts), row.get(answer)]  # None if the row has no answer
        named = zip(cycle(("user", "assistant")), turns)
        conversation = [{"role": role, "content": turn} for role, turn in named if turn is not None]
    if type(conversation) is not list or not conversation:
        wanted = " or ".join((*names, *question[:1]))
        raise RowError(f"wanted a list of messages, as {wanted}, got {short(conversation)}")
    return conversation, set(used)


def _from_messages(row: Row, conversation: list[Any]) -> dict[str, Any]:
    """Split a conversation into question, answer, system prompt and media."""
    turns: list[dict[str, Any]] = []
    slots: Slots = []
    for message in conversation:
        role, words, places, extra = _turn(message)
        turns.append({"role": role, "content": words, **extra})
        slots += places
    media = _filled(_media(row), slots)
    ours: dict[str, Any] = {}
    system = row.get("system") or ""
    if turns[0]["role"] == "system":
        first = turns.pop(0)["content"]
        if system not in ("", first):
            raise RowError(f"the row has two system prompts, {short(system)} and {short(first)}; keep one")
        system = first
    if system:
        ours["system"] = text(system, "system")
    # If the last message is not from the assistant, the answer is in another column or unknown.
    answer = _answer(turns.pop(), "answer") if turns and turns[-1]["role"] == "assistant" else None
    match turns:
        case [{"role": "user", "content": question, **extra}] if not extra:
            # The media marks at the beginning of the text, and the line break after them.
            leading = re.match(rf"(?:\s*(?:{media_marks().pattern}))+\n?", question)
            marks = len(media_marks().findall(question))
            # If all marks precede the text, remove them: media without a mark are placed there anyway.
            if leading and marks == sum(map(len, media.values())) == len(media_marks().findall(leading[0])):
                question = question[leading.end() :]
            ours["question"] = question
        case _ if any(turn["role"] == "user" for turn in turns):
            ours["messages"] = turns
        case _:
            raise RowError("its messages ask nothing")
    if answer is not None:
        ours["answer"] = answer
    return ours | media


def _turn(message: Any) -> tuple[str, str, Slots, dict[str, Any]]:
    """Parse a message: role, text with media marks, media placeholders, and keys for chat templates."""
    message = mapping(message, "message")
    role = message.get("role", message.get("from"))
    if type(role) is not str or role not in ROLES:
        raise RowError(f"cannot convert a message of the role {short(role)}; known are {', '.join(ROLES)}")
    extra = kept_keys(
        {key: value for key, value in message.items() if key not in ("from", "value")}, "message"
    )
    content = message.get("content", message.get("value"))
    return ROLES[role], *_text_of("" if extra and content is None else content), extra


def _text_of(content: Any) -> tuple[str, Slots]:
    """Convert a message's content to text with a mark per medium; also return its media placeholders."""
    words: list[str] = []
    slots: Slots = []
    for part in [None] if content is None else _listed(content):  # None causes the error below
        match plain_part(part):
            case str(piece):
                words.append(piece)
            case {"type": "text", "text": str(piece), **rest} if not has_content(rest):
                words.append(piece)
            case {"type": str(kind), **rest} if kind in MODALITIES and not has_content(
                {key: value for key, value in rest.items() if key != kind}
            ):
                words.append(f"<{kind}>")
                slots.append((kind, rest.get(kind)))
                continue
            case _:
                raise RowError(f"wanted a text or parts as the content of a message, got {short(part)}")
        slots += [(kind, None) for kind in media_marks().findall(piece)]
    return "".join(words), slots


def _filled(media: dict[str, list[Any]], slots: Slots) -> dict[str, list[Any]]:
    """Merge media from columns and from messages, in the order of their placeholders in the text."""
    merged: dict[str, list[Any]] = {}
    for modality in MODALITIES.values():
        name = modality.columns[1]
        own, left = [value for kind, value in slots if kind == modality.kind], iter(media.get(name, []))
        if own.count(None) == len(media.get(name, [])):
            files = [next(left) if value is None else value for value in own]
        else:
            files = [*left, *(value for value in own if value is not None)]
        merged[name] = [file for value in files for file in _listed(value)]
    return {name: files for name, files in merged.items() if files}


def _rejected(conversation: list[Any], rejected: list[Any]) -> str:
    """Return the last of `rejected_messages`; RowError if earlier messages differ from the conversation."""
    if not rejected or rejected[:-1] != conversation[:-1]:
        raise RowError("wanted `rejected_messages` that differ from `messages` in the last one alone")
    return _answer(rejected[-1], "rejected_messages")


def _messages(row: Row) -> tuple[list[dict[str, Any]], dict[str, list[Any]], str | None]:
    """Return a row's prompt as messages with a mark for every medium, its media, and its recorded answer."""
    turns = asked_of(row)
    messages: list[dict[str, Any]] = []
    slots: Slots = []
    for turn in as_turns("" if turns is None else turns, "prompt"):
        role, words, places, extra = _turn(turn)
        messages.append({"role": role, "content": words, **extra})
        slots += places
    completion = row.get("completion")
    if messages and messages[-1]["role"] == "assistant":
        if completion is not None:
            raise RowError("the row has a `completion` beside the answer of its messages; keep one")
        completion = messages.pop()
    first = next((turn for turn in messages if turn["role"] == "user"), None)
    if first is None or not first["content"].strip():
        raise RowError("the row has no `question` and no message of a user")
    media = _filled(_media(row), slots)
    if not slots:  # unlike mmrl, the toolkits need a placeholder in the text for every file
        marks = (f"<{kind}>" * len(media.get(m.columns[1], ())) for kind, m in MODALITIES.items())
        first["content"] = "".join(marks) + first["content"]
    if row.get("choices") is not None:
        last = [turn for turn in messages if turn["role"] == "user"][-1]
        last["content"] = "\n".join([last["content"], *lettered(row["choices"])])
    return messages, media, None if completion is None else _answer(completion, "completion")


def _answer(value: Any, name: str) -> str:
    """Convert an answer to text; it is a message, a text, a number, or a list with one of these."""
    match value:
        case {"from": _} | {"value": _}:
            role, words, _, extra = _turn({"from": "gpt", **value})
        case {"type": _} | [{"type": _}, *_]:
            return _text_of(value)[0]
        case {**message}:
            role, words, _, extra = _turn({"role": "assistant", **message})
        case [one]:
            return _answer(one, name)
        case [_, *_]:
            raise RowError(f"wanted one answer as `{name}`, got {len(value)}; write a row for each of them")
        case _:
            return answer_of(value, name)
    if role != "assistant":
        raise RowError(f"wanted words of the assistant as `{name}`, got {short(value)}")
    if extra:
        raise RowError(f"an answer is a text, but `{name}` has `{min(extra)}` beside it; write that into it")
    return words


def _reply(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def _first(value: Any) -> Any:
    """Return the first element of a list of answers; return any other value unchanged."""
    match value:
        case [first, *_]:
            return first
    return value


def _media(row: Row) -> dict[str, list[Any]]:
    columns = (modality.columns for modality in MODALITIES.values())
    media = {several: _listed(row.get(several)) + _listed(row.get(one)) for one, several in columns}
    return {name: files for name, files in media.items() if files}


def _listed(value: Any) -> list[Any]:
    match value:
        case None:
            return []
        case [*values]:
            return values
    return [value]
