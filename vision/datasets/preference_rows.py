"""Parsers of preference rows in the formats of TRL, LLaMA-Factory and ms-swift: answers, media, tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mmrl.core.modalities import MODALITIES, media_columns
from mmrl.core.types import Media, Message, Outcome
from mmrl.data.fields import RowError, is_number, listed, mapping, parse_json, short, text, unpacked
from mmrl.data.media_root import MediaRoot, media_refs
from mmrl.data.messages import (
    ASKED,
    as_turns,
    asked_of,
    holds_media,
    read_messages,
    recorded_turn,
    same_words,
    without_null,
)
from mmrl.data.row_fields import has_content
from mmrl.data.video import FrameSampling
from mmrl.vision.benchmarks.conversions import CONVERSATIONS, conversation_of

SIDES = ("chosen", "rejected")
EXPORTED = ("conversations", "chosen_answer", "rejected_answer")  # added by `export.py`, for LLaMA-Factory
REJECTED = ("rejected_response", "rejected_messages")  # columns of ms-swift
OURS = (*ASKED, "messages")
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
# Maps a toolkit to those of its question and answer columns that are not in OURS.
THEIRS = {
    "llama_factory": ("conversations", "instruction", "input", "output", "history"),
    "ms_swift": ("query", "response", "history", *REJECTED),
}
QUESTIONS = tuple(dict.fromkeys((*OURS, *THEIRS["llama_factory"], *THEIRS["ms_swift"], "system", "tools")))
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool"}
CALLS = ("function_call", "tool_call")  # roles of messages that are tool calls as JSON
OTHER_MEDIA = {f"rejected_{modality.columns[1]}": kind for kind, modality in MODALITIES.items()}


@dataclass(frozen=True)
class RowMedia:
    """Media in the columns of a row, and the media that replace them for the rejected answer (ms-swift).

    Args:
        root: Folder of the media.
        columns: The row.
        place: Name of the row in errors.
        sampling: Sampling of video frames.
    """

    root: MediaRoot
    columns: Mapping[str, Any]
    place: str
    sampling: FrameSampling

    def shown(self, rejected: bool = False) -> list[Media]:
        """List the media of the columns; with `rejected`, `rejected_images` etc. replace `images` etc."""
        other = {kind: name for name, kind in OTHER_MEDIA.items() if has_content(self.columns.get(name))}
        names = [(name, kind) for name, kind in media_columns().items() if not rejected or kind not in other]
        names += [(name, kind) for kind, name in other.items() if rejected]
        refs = (ref for name, kind in names for ref in media_refs(self.columns.get(name), kind, name))
        return [self.root.medium(ref, self.place, self.sampling) for ref in refs]

    def read(
        self, question: Any, answer: Any, name: str, rejected: bool = False
    ) -> tuple[tuple[Message, ...], Outcome]:
        """Read a prompt and a recorded answer: a text, a message, or messages that end with one.

        Media of columns fill the placeholders of the whole conversation. Returns the messages of the
        prompt, and the answer with its `turns`.
        """
        *before, last = answer if is_conversation(answer) else [answer]
        asked = as_turns(question, "prompt")
        reader = self.root.reader(self.place, self.sampling)
        messages = read_messages([*asked, *before], self.shown(rejected), reader)
        words, extra = recorded_turn(last, name)
        turns, roles = messages[len(asked) :], [message.role for message in messages[len(asked) :]]
        if turns and (roles[0], roles[-1] == "assistant") != ("assistant", False):
            raise RowError(
                f"wanted turns of the assistant and replies to them as `{name}`, got {short(answer)}"
            )
        if any(turn.role == "assistant" and part.media for turn in turns for part in turn.parts):
            raise RowError(f"a turn of the assistant in `{name}` shows a medium, which no model here writes")
        return messages[: len(asked)], Outcome(text=words, extra=extra, turns=turns)


def question_and_sides(columns: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the question of a pair, and its chosen and rejected answers, from columns of any toolkit.

    The answers are texts, messages, or lists of messages, which may repeat the question.
    """
    fields = {name: openai_turns(columns.get(name), name) for name in (*ASKED, "messages", *SIDES)}
    fields |= {"system": columns.get("system")}
    if has_content(columns.get("chosen_answer")):  # exported by mmrl, with extra columns for LLaMA-Factory
        columns = {name: value for name, value in columns.items() if name not in EXPORTED}
    if (toolkit := toolkit_of_row(columns)) is None:
        return asked_of(fields), fields["chosen"], fields["rejected"]
    turns = conversation(columns, toolkit)
    if toolkit == "llama_factory" or not any(has_content(columns.get(name)) for name in REJECTED):
        return asked_of({"prompt": turns, "system": fields["system"]}), fields["chosen"], fields["rejected"]
    if beside := [name for name in SIDES if has_content(columns.get(name))]:
        raise RowError(f"the row has `{beside[0]}` beside the rejected answer of ms-swift; keep one")
    response, messages = (openai_turns(columns.get(name), name) for name in REJECTED)
    if has_content(response) and has_content(messages):
        raise RowError("the row has `rejected_response` beside `rejected_messages`; keep one")
    prompt, chosen = (turns[:-1], turns[-1:]) if has_content(response) else (None, turns)
    rejected = response if has_content(response) else messages
    return asked_of({"prompt": prompt, "system": fields["system"]}), chosen, rejected


def question_and_answer(columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the question and the answer of a row with one answer, from columns of any toolkit.

    The answer is in `completion`, or is all turns after the last message of the user.
    """
    fields = {name: openai_turns(columns.get(name), name) for name in (*ASKED, "messages", "completion")}
    fields |= {"system": columns.get("system")}
    toolkit, answer = toolkit_of_row(columns), fields["completion"]
    if toolkit is None:
        question = asked_of(fields)
    else:
        question = asked_of({"prompt": conversation(columns, toolkit), "system": fields["system"]})
    if has_content(answer):
        return question, answer
    turns = as_turns(question, "prompt")
    roles = [mapping(turn, f"prompt[{i}]").get("role") for i, turn in enumerate(turns)]
    end = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    if not turns[end:]:
        raise RowError("wanted an answer, as `completion` or at the end of the messages, got none")
    return turns[:end], turns[end:]


def label_of(columns: Mapping[str, Any]) -> float:
    """Return 1.0 for a desirable answer and -1.0 for an undesirable one, from `label` or `kto_tag`.

    Raises `RowError` unless the label is true, false, 1 or 0, or one of these as text (in CSV files).
    """
    names = [name for name in ("label", "kto_tag") if has_content(columns.get(name))]
    labels = [_truth(columns[name], name) for name in names]
    if not labels:
        raise RowError("wanted true or false as `label`, got none")
    if len(set(labels)) > 1:
        raise RowError("the row has a `label` and another `kto_tag`; keep one of them")
    return 1.0 if labels[0] else -1.0


def _truth(value: Any, name: str) -> bool:
    word = value.strip().lower() if isinstance(value, str) else str(float(value)) if is_number(value) else ""
    truth = value if isinstance(value, bool) else TRUTHS.get(word)
    if truth is None:
        raise RowError(f"wanted true or false as `{name}`, got {short(value)}")
    return truth


def toolkit_of_row(columns: Mapping[str, Any]) -> str | None:
    """Return the toolkit whose columns contain a row's question; None for TRL's and mmrl's columns.

    Raises `RowError` for a row with questions in columns of several toolkits.
    """
    filled = {name for name, value in columns.items() if has_content(value)}
    found = [toolkit for toolkit, names in THEIRS.items() if filled & {*names} - {"history"}]
    if not found and "history" not in filled:
        return None
    toolkit = found[0] if found else "llama_factory"
    known = {*THEIRS[toolkit], *(("messages",) if filled & {*REJECTED} and "query" not in filled else ())}
    asking = {*OURS, *(name for names in THEIRS.values() for name in names)}
    if toolkit == "llama_factory" and "conversations" in filled:
        known = {"conversations"}
    if beside := sorted(filled & asking - known):
        raise RowError(f"the row asks in `{beside[0]}` beside {', '.join(sorted(filled & known))}; keep one")
    return toolkit


def conversation(columns: Mapping[str, Any], toolkit: str) -> list[Any]:
    """Return the conversation of a row of another toolkit, with its answer if any, in OpenAI's form."""
    turns, used = conversation_of({**columns, "messages": columns.get("messages")}, *CONVERSATIONS[toolkit])
    return listed(openai_turns(turns, min(used)), min(used))


def openai_turns(value: Any, name: str) -> Any:
    """Convert messages of ShareGPT or ms-swift to OpenAI's form; return any other value unchanged.

    Messages may have `from` and `value`, and the roles human, gpt, observation, tool_response, function_call
    and tool_call. Tool calls of adjacent messages become one turn.
    """
    value = unpacked(value)
    alone = isinstance(value, Mapping) and (has_content(value.get("from")) or _role(value) in CALLS)
    turns = [value] if alone else value
    if not (isinstance(turns, list) and turns and all(isinstance(t, Mapping) and _role(t) for t in turns)):
        return value
    written: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        role, keys = _role(turn), {key: item for key, item in turn.items() if key not in ("from", "value")}
        content = turn["value"] if turn.get("content") is None and "value" in turn else turn.get("content")
        if role not in CALLS:
            written.append({**keys, "role": ROLES.get(role, role), "content": content})
            continue
        try:
            calls = parse_json(content) if isinstance(content, str) else content
        except RowError as error:
            raise RowError(
                f"wanted a tool call as JSON in `{name}[{i}]`, got {short(content)}: {error}"
            ) from error
        calls = calls if isinstance(calls, list) else [calls]
        if role == "tool_call" and written and "tool_calls" in written[-1]:
            written[-1]["tool_calls"] += calls
        else:
            written.append({**keys, "role": "assistant", "content": "", "tool_calls": [*calls]})
    return written


def _role(turn: Mapping[str, Any]) -> str:
    """Return the role of a message; "" if it is no text."""
    role = turn.get("role") or turn.get("from")
    return role if isinstance(role, str) else ""


def tools_of(columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Read the column `tools`: JSON schemas of functions, as a list or as JSON text."""
    value = columns.get("tools")
    if not has_content(value):
        return ()
    schemas = []
    for i, tool in enumerate(listed(value, "tools")):
        tool = without_null(mapping(parse_json(tool) if isinstance(tool, str) else tool, f"tools[{i}]"))
        function = mapping(tool.get("function", tool), f"tools[{i}]")
        text(function.get("name"), f"tools[{i}].name")
        schemas.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(schemas)


# ---- the common beginning of two conversations


def split_pair(question: Any, sides: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return (prompt, answer) of the chosen and of the rejected conversation.

    Turns that begin both conversations form the prompt; the media of these turns may differ. The answers
    begin with a turn of the assistant.
    """
    prompt = as_turns(question, "prompt") if has_content(question) else []
    if prompt and mapping(prompt[-1], "prompt").get("role") == "assistant":
        # `messages` may repeat the chosen conversation with its answer, as in UltraFeedback.
        last = sides[0][-1] if is_conversation(sides[0]) else sides[0]
        if recorded_turn(prompt[-1], "messages") != recorded_turn(last, "chosen"):
            raise RowError(f"the prompt ends with an answer, {short(prompt[-1])}, that is not the chosen one")
        question = prompt = prompt[:-1]
    chosen, rejected = (_conversation(prompt, side, name) for side, name in zip(sides, SIDES, strict=True))
    if chosen is None or rejected is None:
        after = [None if talk is None else talk[len(prompt) :] for talk in (chosen, rejected)]
        question = next((talk[: len(prompt)] for talk in (chosen, rejected) if talk and prompt), question)
        return [(question, turns or side) for turns, side in zip(after, sides, strict=True)]
    pairs = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: _alike(*pair), pairs))
    if chosen == rejected or same in (len(chosen), len(rejected)) and len(chosen) != len(rejected):
        raise RowError("wanted `chosen` and `rejected` that differ in their last turn, got equal ones")
    if same < len(prompt):
        raise RowError(
            f"`chosen` and `rejected` repeat the prompt, {short(prompt)}, in different ways; keep one"
        )
    talks = chosen, rejected
    same = min(same, len(chosen) - 1)
    while same and not all(talk[same].get("role") == "assistant" for talk in talks):
        same -= 1  # an answer starts with the call, not the tool's reply
    if not same and chosen[0].get("role") != "assistant":
        raise RowError("`chosen` and `rejected` differ in their prompt; both must answer the same one")
    return [(talk[:same], talk[same:]) for talk in talks]


def _alike(turn: Any, other: Any) -> bool:
    """Whether two turns are equal, ignoring media in turns of the user and of tools."""
    if turn == other or "assistant" in (turn.get("role"), other.get("role")):
        return turn == other
    keys = [{key: value for key, value in one.items() if key != "content"} for one in (turn, other)]
    shows = [holds_media([one]) for one in (turn, other)]
    return same_words([turn], [other]) and keys[0] == keys[1] and shows[0] == shows[1]


def _conversation(prompt: list[Any], side: Any, name: str) -> list[Any] | None:
    """Join the prompt and one side's messages, which may repeat the prompt; None without messages."""
    if not is_conversation(side):
        return None
    if side[0].get("role") in ("assistant", "tool"):
        return [*prompt, *side]
    # Ignore a system message that only one of `prompt` and `side` has.
    first, other = (bool(turns) and turns[0].get("role") == "system" for turns in (prompt, side))
    begins, talk = prompt[first and not other :], side[other and not first and bool(prompt) :]
    if not same_words(begins, talk[: len(begins)]):
        raise RowError(f"the prompt, {short(prompt)}, is not the one that `{name}` begins with; keep one")
    before = side[: len(side) - len(talk)]
    # Keep the version with media: often only the conversation contains the images of the prompt.
    repeated = talk[: len(begins)] if holds_media(talk[: len(begins)]) else begins
    return [*before, *prompt[: len(prompt) - len(begins)], *repeated, *talk[len(begins) :]]


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(t, Mapping) and "role" in t for t in value)
    )
