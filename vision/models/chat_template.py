"""The chat template of a model: in which form it reads contents and calls, and what ends an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from mmrl.core.modalities import MODALITIES
from mmrl.core.plain_text import block_after

Tools = tuple[Mapping[str, Any], ...]  # JSON schemas of functions
Content = str | list[dict[str, Any]]
# How the content of a message is given: a block for each part, one block for texts side by side, or a text.
BLOCKS, MERGED, TEXT = "blocks", "merged", "text"
# What a template raises for a message that it does not take.
REFUSED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
FIRST, SECOND = "qzfirstzq", "qzsecondzq"  # parts of a content, to see whether a template writes both


@dataclass(frozen=True)
class Read:
    """In which forms a template reads the messages of a role, best first, or `why` it reads none.

    `media` are the kinds of media that it has a placeholder for.
    """

    forms: tuple[str, ...] = ()
    media: frozenset[str] = frozenset()
    why: str = ""


@dataclass(frozen=True)
class Ends:
    """What a template writes after a turn of the assistant.

    `tokens` end an answer: first the template's own, last the tokenizer's. `before` are those that stand
    between an answer and the turn after it, up to its end token. It `closes` turns where it ends the last
    turn of a conversation too; otherwise the token is the beginning of the next turn, as in GLM.
    """

    tokens: list[int]
    before: list[int] = field(default_factory=list)
    closes: bool = False


class ChatTemplate:
    """Writes conversations in the words of a model's template, each content in a form that it reads.

    Templates differ in what they take: blocks of texts and media, texts alone, the first block alone, some of
    it by role. The form of a role is found by rendering a few words. Messages are dictionaries whose content
    is a list of blocks.

    Args:
        processor: A processor of transformers, or a `TextProcessor`.
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self._read: dict[Any, Read] = {}
        self._calls: dict[Any, str] = {}

    @property
    def _texts(self) -> list[Any]:
        """The template itself, which a program may replace."""
        return [getattr(part, "chat_template", None) for part in (self.processor, self.tokenizer)]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, answers: bool = True
    ) -> str:
        """Write messages, and what begins an answer if one `answers`.

        Raises ValueError, by name, for a conversation that the template does not take.
        """
        try:
            return self._apply(self.formed(messages, tools), tools, answers)
        except REFUSED as error:
            if isinstance(error, Unreadable):
                raise
            roles = ", ".join(message["role"] for message in messages)
            raise Unreadable(
                f"the chat template of the model does not take a conversation of the roles {roles} "
                f"({type(error).__name__}: {error}); leave such conversations out, or save the model with a "
                "template that takes them"
            ) from error

    def formed(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> list[dict[str, Any]]:
        """Give contents and calls the form that the template reads; calls without an id get one."""
        written, asked = [], list[str]()
        for message in messages:
            content = self._content(message["role"], message.get("content") or [], tools)
            written.append(one := {**message, "content": content})
            if calls := message.get("tool_calls"):
                one["tool_calls"] = [self._call(call, n, tools) for n, call in enumerate(calls, 1)]
                asked = [call["id"] for call in one["tool_calls"]]
            elif message["role"] == "tool":
                one.setdefault("tool_call_id", asked.pop(0) if asked else call_id(1))
        return written

    def reads(self, role: str, tools: Tools = ()) -> Read:
        """Find the forms in which the template reads the messages of a role."""
        key = json.dumps([role, tools, self._texts])
        if key not in self._read:
            self._read[key] = self._tried(role, tools)
        return self._read[key]

    def after_answer(self, replies: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """Write what stands between an answer and the next one: its end, replies, and what begins the next.

        Raises ValueError where the template leaves the turn of the assistant out.
        """
        marker = self._unused(replies, tools)
        _, found, after = self.render([*_turn(marker), *replies], tools).rpartition(marker)
        if not found:
            raise Unreadable(
                "the chat template of the model leaves out the words of an assistant before "
                f"{', '.join(reply['role'] for reply in replies)}, so that what follows them is not known; "
                "save the model with a template that keeps them"
            )
        return after

    def after_calls(self, tools: Tools) -> tuple[str, str]:
        """Write what stands after the argument of a call, and after an answer, where a tool replies.

        Raises ValueError where the reply is left out after an answer.
        """
        marker, name = self._unused([], tools), _name(tools)
        call = {"type": "function", "function": {"name": name, "arguments": {FIRST: marker}}}
        reply = {"role": "tool", "content": _texts(SECOND), "name": name}
        asked, turn = _turn("")
        called = self.render([asked, {**turn, "tool_calls": [call]}, reply], tools).rpartition(marker)[2]
        said = self.after_answer([reply], tools)
        if SECOND not in said:
            raise Unreadable("the chat template of the model leaves out replies of tools after an answer")
        return called, said

    def ends(self) -> Ends:
        """Find the tokens that end an answer: what the template writes after one, and the tokenizer's own.

        The checkpoint's generation_config is not read. Raises ValueError where there is none.
        """
        marker, user = self._unused([]), {"role": "user", "content": _texts(SECOND)}
        last = self.render(_turn(marker), answers=False).rpartition(marker)[2]
        between = self.after_answer([user]).partition(SECOND)[0]
        closing, before, eos = self._leading(last), self._leading(between), self.tokenizer.eos_token_id
        if shared := commonprefix([closing, before]):  # Cohere ends a turn with two tokens
            closing = before = shared[: shared.index(eos) + 1] if eos in shared else shared[:1]
        ends = closing[-1:] if shared else closing[:1] or before[:1]
        if not closing and before and self.reads("tool").forms:  # in GLM a reply of a tool begins otherwise
            reply = {"role": "tool", "content": _texts(SECOND)}
            ends += self._leading(self.after_answer([reply]).partition(SECOND)[0])[:1]
        ends = list(dict.fromkeys([*ends, *([eos] if eos is not None else [])]))
        if not ends:
            raise Unreadable("the tokenizer names no token that ends an answer; set its eos_token")
        return Ends(ends, before if shared else before[:1], bool(closing))

    @cached_property
    def reply_block(self) -> str:
        """The block in which the template writes the reply of a tool; empty where it has none."""
        reply = {"role": "tool", "content": _texts(SECOND)}
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        asked, turn = _turn("y")
        for before in ({**turn, "tool_calls": [call]}, turn):
            try:
                found, _, after = self.render([asked, before, reply], answers=False).rpartition(SECOND)
            except Unreadable:
                continue
            if found:
                return block_after(after)
        return ""

    @cached_property
    def schema_block(self) -> str:
        """The block in which the template lists tools; empty where it has none."""
        function = {"name": "look", "description": SECOND, "parameters": {"type": "object", "properties": {}}}
        tools = ({"type": "function", "function": function},)
        return block_after(self.render(_turn("y")[:1], tools, answers=False).partition(SECOND)[2])

    def _leading(self, text: str) -> list[int]:
        """List the control tokens that a text begins with, after white space."""
        ids = self.tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"]
        control = self.tokenizer.added_tokens_decoder
        return next((ids[:n] for n, token in enumerate(ids) if token not in control), ids)

    def _content(self, role: str, blocks: Sequence[Mapping[str, Any]], tools: Tools) -> Content:
        """Give the content of a message the first form that the template reads."""
        read, kinds = self.reads(role, tools), {block["type"] for block in blocks} - {"text"}
        forms = [form for form in read.forms if form != TEXT or not kinds]
        if read.forms and self.processor.image_processor is None:
            return _in_form(blocks, read.forms[0] if not kinds else BLOCKS)  # refused by `TextProcessor`
        lost = kinds - read.media
        if not forms or lost:
            what = f"{' and '.join(sorted(lost))}s in messages" if lost else "messages"
            raise Unreadable(
                f"the chat template of the model takes no {what} of the role `{role}` "
                f"({read.why or 'it has no words for them'}); leave them out, or save the model with a "
                "template that takes them"
            )
        return _in_form(blocks, forms[0])

    def _tried(self, role: str, tools: Tools) -> Read:
        """Render two texts in every form, after and before other turns that are read."""
        # Models with media are trained on blocks, and language models on texts.
        order = (TEXT, BLOCKS, MERGED) if self.processor.image_processor is None else (BLOCKS, MERGED, TEXT)
        tried = [
            self._around({"role": role, "content": _in_form(_texts(FIRST, SECOND), form)}, tools)
            for form in order
        ]
        whys = list[str]()
        for conversations in zip(*tried, strict=True):  # each in every form
            lacks = [self._lacks(messages, tools) for messages in conversations]
            if found := tuple(form for form, lack in zip(order, lacks, strict=True) if not lack):
                return Read(found, media=self._shown(conversations[0], role, tools))
            whys += lacks
        return Read(why=whys[0])

    def _shown(self, messages: list[dict[str, Any]], role: str, tools: Tools) -> frozenset[str]:
        """Find the kinds of media that the template has words for in the last message of a role."""
        place = max(n for n, message in enumerate(messages) if message["role"] == role)
        shown = set[str]()
        for kind in MODALITIES:
            texts = list[str]()
            for blocks in (_texts(FIRST + SECOND), [{"type": kind}, *_texts(FIRST + SECOND)]):
                tried = [*messages[:place], {**messages[place], "content": blocks}, *messages[place + 1 :]]
                try:
                    texts.append(self._apply(tried, tools, answers=False))
                except REFUSED:
                    break
            else:
                as_words = re.search(rf"""['"]type\\?['"]\s*:\s*\\?['"]{kind}""", texts[1])
                if texts[0] != texts[1] and FIRST + SECOND in texts[1] and not as_words:
                    shown.add(kind)
        return frozenset(shown)

    def _lacks(self, messages: list[dict[str, Any]], tools: Tools) -> str:
        """Say why the template does not write both texts of a message that is tried; empty where it does."""
        try:
            text = self._apply(messages, tools, answers=False)
        except REFUSED as error:
            return f"{type(error).__name__}: {error}"
        whole = FIRST in text and SECOND in text.partition(FIRST)[2] and not _printed(text)
        return "" if whole else "it leaves out what they say"

    def _around(self, probe: dict[str, Any], tools: Tools) -> Iterator[list[dict[str, Any]]]:
        """Make the conversations in which a message of a role is tried."""
        if probe["role"] == "user":
            yield [probe]
            return
        turn = self.formed(_turn("y") if probe["role"] == "tool" else _turn("y")[:1], tools)
        match probe["role"]:
            case "assistant":
                yield from ([*turn, probe], [*turn, probe, *turn])
            case "tool":
                call = {"type": "function", "function": {"name": _name(tools), "arguments": {}}}
                reply = {**probe, "tool_call_id": call_id(1), "name": _name(tools)}
                try:
                    yield [turn[0], {**turn[1], "tool_calls": [self._call(call, 1, tools)]}, reply]
                except Unreadable:  # some write replies though they leave out calls
                    yield [*turn, reply]
            case _:
                yield from ([probe, *turn], [*turn, probe])

    def _call(self, call: Mapping[str, Any], number: int, tools: Tools) -> dict[str, Any]:
        """Give the arguments of a call the form that the template reads: a mapping, or JSON in a text."""
        function = dict(call.get("function", call))
        given = function.setdefault("arguments", {})
        if self._reads_calls(tools) == TEXT and not isinstance(given, str):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        elif self._reads_calls(tools) != TEXT and isinstance(given, str):
            function["arguments"] = json.loads(given)
        return {"id": call_id(number), **call, "type": "function", "function": function}

    def _reads_calls(self, tools: Tools) -> str:
        """Find the form in which the template reads the arguments of calls; raises ValueError for none."""
        key = json.dumps([tools, self._texts])
        if key not in self._calls:
            self._calls[key] = next(self._forms_of_calls(tools), "")
        if not self._calls[key]:
            raise Unreadable(
                "the chat template of the model leaves out the calls of tools in a turn of the assistant; "
                "leave such turns out, or save the model with a template that writes them"
            )
        return self._calls[key]

    def _forms_of_calls(self, tools: Tools) -> Iterator[str]:
        for form, arguments in (("mapping", {FIRST: SECOND}), (TEXT, json.dumps({FIRST: SECOND}))):
            asked, turn = self.formed(_turn(""), tools)
            function = {"name": _name(tools), "arguments": arguments}
            turn["tool_calls"] = [{"id": call_id(1), "type": "function", "function": function}]
            try:
                text = self._apply([asked, turn], tools, answers=False)
            except REFUSED:
                continue
            # Neither the words of Python, nor JSON inside a text of JSON.
            if FIRST in text and SECOND in text and not re.search(rf"'{FIRST}'|\\\"{FIRST}", text):
                yield form

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Tools, answers: bool) -> str:
        options = {"tools": list(tools)} if tools else {}
        return self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answers, **options
        )

    def _unused(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """Draw a word that occurs in no message, tool or template."""
        said, number = json.dumps([*messages, *tools, *self._texts], default=str), 0
        while (word := f"qz{number}zq") in said:
            number += 1
        return word


def call_id(number: int) -> str:
    """Name a call of a turn in nine letters and figures, which Mistral's templates ask for."""
    return f"call{number:05}"


class Unreadable(ValueError):
    """A conversation that the chat template of a model does not take; the message says what it lacks."""


def _turn(words: str) -> list[dict[str, Any]]:
    """A question and its answer."""
    return [{"role": role, "content": _texts(text)} for role, text in (("user", "x"), ("assistant", words))]


def _texts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _name(tools: Tools) -> str:
    return tools[0].get("function", tools[0])["name"] if tools else "look"


def _in_form(blocks: Sequence[Mapping[str, Any]], form: str) -> Content:
    if form == TEXT:
        return "".join(block["text"] for block in blocks)
    if form == BLOCKS and blocks:
        return list(map(dict, blocks))
    merged: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "text" and merged and merged[-1]["type"] == "text":
            merged[-1]["text"] += block["text"]
        else:
            merged.append(dict(block))
    return merged or _texts("")


def _printed(text: str) -> bool:
    """Whether a text shows a block in the words of Python or JSON."""
    return bool(re.search(rf"""['"]text\\?['"]\s*:\s*\\?['"]{FIRST}""", text))
