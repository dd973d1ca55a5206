"""Chat template of a model: render conversations in a supported format, and find the end tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from itertools import count
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from mmrl.config.loading import ConfigError
from mmrl.core.modalities import MODALITIES
from mmrl.core.plain_text import block_after

Tools = tuple[Mapping[str, Any], ...]  # JSON schemas of functions
Content = str | list[dict[str, Any]]
# Formats of message contents: a block per part, blocks with adjacent texts merged, or one text.
BLOCKS, MERGED, TEXT = "blocks", "merged", "text"
# Exceptions that templates raise for unsupported messages.
REFUSED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
FIRST, SECOND = "qzfirstzq", "qzsecondzq"  # probe texts, to test whether a template renders both texts


@dataclass(frozen=True)
class Read:
    """Content formats and kinds of media that a template supports in messages of a role."""

    forms: tuple[str, ...] = ()  # supported content formats, best first
    media: frozenset[str] = frozenset()  # supported kinds of media, "image" and "video"
    why: str = ""  # the reason if no format is supported


@dataclass(frozen=True)
class Ends:
    """The tokens that end an answer."""

    tokens: list[int]  # end tokens: from the template first, the EOS token last
    before: list[int] = field(default_factory=list)  # control tokens that the template writes after an answer
    closes: bool = False  # whether the template also ends the last turn (GLM's does not)


class ChatTemplate:
    """Renders conversations with the chat template of a model, in a content format that it supports.

    Templates expect contents as blocks of texts and media, or as one text; rendering probe texts determines
    the format for each role. Messages are dictionaries whose content is a list of blocks.

    Args:
        processor: A processor of transformers, or a `TextProcessor`.
        variables: Variables of the template, such as `enable_thinking`. Raises `ConfigError` for one that the
            template does not read.
    """

    def __init__(self, processor: Any, variables: Mapping[str, Any] | None = None) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.variables = dict(variables or {})
        self._read: dict[Any, Read] = {}
        self._calls: dict[Any, str] = {}
        taken = signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents"}
        for name in self.variables:
            if name in taken or not re.search(rf"\b{re.escape(name)}\b", json.dumps(self._texts)):
                raise ConfigError(
                    f"`chat_template_kwargs` has '{name}', which is no variable of the chat template of the "
                    "model; leave it out"
                )

    @property
    def _texts(self) -> list[Any]:
        """Current template texts of processor and tokenizer (a user may replace them)."""
        return [getattr(part, "chat_template", None) for part in (self.processor, self.tokenizer)]

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, answers: bool = True
    ) -> str:
        """Render messages; if `answers`, append the generation prompt (the start of the assistant's turn).

        Raises ValueError for a conversation that the template does not support.
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
        """Convert message contents and tool calls to a supported format; add missing ids of calls."""
        formed, open_calls = [], list[str]()  # tool calls without a reply, by id
        for message in messages:
            content = self._content(message["role"], message.get("content") or [], tools)
            formed.append(one := {**message, "content": content})
            if calls := message.get("tool_calls"):
                one["tool_calls"] = [self._call(call, n, tools) for n, call in enumerate(calls, 1)]
                open_calls = [call["id"] for call in one["tool_calls"]]
            elif message["role"] == "tool":
                one.setdefault("tool_call_id", open_calls.pop(0) if open_calls else call_id(1))
        return formed

    def reads(self, role: str, tools: Tools = ()) -> Read:
        """Return the content formats and media kinds that the template supports for a role."""
        key = json.dumps([role, tools, self._texts])
        if key not in self._read:
            self._read[key] = self._probe(role, tools)
        return self._read[key]

    def after_answer(self, replies: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """Render the text between two answers: end of the first, replies, and the next generation prompt.

        Raises ValueError if the template omits assistant turns.
        """
        marker = self._unused(replies, tools)
        _, answer, after = self.render([*_turn(marker), *replies], tools).rpartition(marker)
        if not answer:
            raise Unreadable(
                "the chat template of the model leaves out the words of an assistant before "
                f"{', '.join(reply['role'] for reply in replies)}, so that what follows them is not known; "
                "save the model with a template that keeps them"
            )
        return after

    def after_calls(self, tools: Tools) -> tuple[str, str]:
        """Return the text that follows the argument of a tool call, and the text that follows a plain answer.

        Each contains a probe reply of the tool and the next generation prompt. Raises ValueError if the
        template omits a reply after an answer without a call.
        """
        marker, name = self._unused([], tools), _name(tools)
        call = {"type": "function", "function": {"name": name, "arguments": {FIRST: marker}}}
        reply = {"role": "tool", "content": _texts(SECOND), "name": name}
        question, turn = _turn("")
        called = [question, {**turn, "tool_calls": [call]}, reply]
        after_call = self.render(called, tools).rpartition(marker)[2]
        after_answer = self.after_answer([reply], tools)
        if SECOND not in after_answer:
            raise Unreadable("the chat template of the model leaves out replies of tools after an answer")
        return after_call, after_answer

    def ends(self) -> Ends:
        """Find the tokens that end an answer, from the template and the EOS token of the tokenizer.

        The checkpoint's generation_config is not read. Raises ValueError if there are no such tokens.
        """
        marker, user = self._unused([]), {"role": "user", "content": _texts(SECOND)}
        last = self.render(_turn(marker), answers=False).rpartition(marker)[2]
        between = self.after_answer([user]).partition(SECOND)[0]
        closing, before, eos = self._leading(last), self._leading(between), self.tokenizer.eos_token_id
        if shared := commonprefix([closing, before]):  # an answer ends with two tokens, as in Cohere
            closing = before = shared[: shared.index(eos) + 1] if eos in shared else shared[:1]
        ends = closing[-1:] if shared else closing[:1] or before[:1]
        if not closing and before and self.reads("tool").forms:  # GLM: another token begins a tool reply
            reply = {"role": "tool", "content": _texts(SECOND)}
            ends += self._leading(self.after_answer([reply]).partition(SECOND)[0])[:1]
        ends = list(dict.fromkeys([*ends, *([eos] if eos is not None else [])]))
        if not ends:
            raise Unreadable("the tokenizer names no token that ends an answer; set its eos_token")
        return Ends(ends, before if shared else before[:1], bool(closing))

    @cached_property
    def reply_block(self) -> str:
        """Tag of the block around replies of tools, such as `tool_response`; empty if there is none."""
        reply = {"role": "tool", "content": _texts(SECOND)}
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        question, turn = _turn("y")
        for answer in ({**turn, "tool_calls": [call]}, turn):
            try:
                before, _, after = self.render([question, answer, reply], answers=False).rpartition(SECOND)
            except Unreadable:
                continue
            if before:
                return block_after(after)
        return ""

    @cached_property
    def schema_block(self) -> str:
        """Tag of the block around tool schemas; empty if there is none."""
        function = {"name": "look", "description": SECOND, "parameters": {"type": "object", "properties": {}}}
        tools = ({"type": "function", "function": function},)
        return block_after(self.render(_turn("y")[:1], tools, answers=False).partition(SECOND)[2])

    def _leading(self, text: str) -> list[int]:
        """Return the control tokens at the beginning of a text, ignoring leading white space."""
        ids = self.tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"]
        control = self.tokenizer.added_tokens_decoder
        return next((ids[:n] for n, token in enumerate(ids) if token not in control), ids)

    def _content(self, role: str, blocks: Sequence[Mapping[str, Any]], tools: Tools) -> Content:
        """Convert the content of a message to the best supported format."""
        read, kinds = self.reads(role, tools), {block["type"] for block in blocks} - {"text"}
        forms = [form for form in read.forms if form != TEXT or not kinds]
        if read.forms and self.processor.image_processor is None:
            return _in_form(blocks, read.forms[0] if not kinds else BLOCKS)  # media are refused later
        lost = kinds - read.media
        if not forms or lost:
            what = f"{' and '.join(sorted(lost))}s in messages" if lost else "messages"
            raise Unreadable(
                f"the chat template of the model takes no {what} of the role `{role}` "
                f"({read.why or 'it has no words for them'}); leave them out, or save the model with a "
                "template that takes them"
            )
        return _in_form(blocks, forms[0])

    def _probe(self, role: str, tools: Tools) -> Read:
        """Find the content formats that a role supports, by rendering two probe texts in each format."""
        # Prefer blocks for models with media, texts for language models, as in their training.
        order = (TEXT, BLOCKS, MERGED) if self.processor.image_processor is None else (BLOCKS, MERGED, TEXT)
        probes = [
            self._around({"role": role, "content": _in_form(_texts(FIRST, SECOND), form)}, tools)
            for form in order
        ]
        whys = list[str]()
        for conversations in zip(*probes, strict=True):  # the same conversation in every format
            faults = [self._fault(messages, tools) for messages in conversations]
            if forms := tuple(form for form, fault in zip(order, faults, strict=True) if not fault):
                return Read(forms, media=self._shown(conversations[0], role, tools))
            whys += faults
        return Read(why=whys[0])

    def _shown(self, messages: list[dict[str, Any]], role: str, tools: Tools) -> frozenset[str]:
        """Find the kinds of media that the template renders in the last message of a role."""
        place = max(n for n, message in enumerate(messages) if message["role"] == role)
        shown = set[str]()
        for kind in MODALITIES:
            texts = list[str]()
            for blocks in (_texts(FIRST + SECOND), [{"type": kind}, *_texts(FIRST + SECOND)]):
                probe = [*messages[:place], {**messages[place], "content": blocks}, *messages[place + 1 :]]
                try:
                    texts.append(self._apply(probe, tools, answers=False))
                except REFUSED:
                    break
            else:
                as_words = re.search(rf"""['"]type\\?['"]\s*:\s*\\?['"]{kind}""", texts[1])
                if texts[0] != texts[1] and FIRST + SECOND in texts[1] and not as_words:
                    shown.add(kind)
        return frozenset(shown)

    def _fault(self, messages: list[dict[str, Any]], tools: Tools) -> str:
        """Return the reason why the template does not render both probe texts; empty if it does."""
        try:
            text = self._apply(messages, tools, answers=False)
        except REFUSED as error:
            return f"{type(error).__name__}: {error}"
        whole = FIRST in text and SECOND in text.partition(FIRST)[2] and not _printed(text)
        return "" if whole else "it leaves out what they say"

    def _around(self, probe: dict[str, Any], tools: Tools) -> Iterator[list[dict[str, Any]]]:
        """Yield conversations with a probe message, in the orders of roles that templates usually expect."""
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
                except Unreadable:  # some templates write replies but omit calls
                    yield [*turn, reply]
            case _:
                yield from ([probe, *turn], [*turn, probe])

    def _call(self, call: Mapping[str, Any], number: int, tools: Tools) -> dict[str, Any]:
        """Convert the arguments of a call to the format of the template: a mapping, or JSON text."""
        function = dict(call.get("function", call))
        arguments = function.setdefault("arguments", {})
        if self._reads_calls(tools) == TEXT and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif self._reads_calls(tools) != TEXT and isinstance(arguments, str):
            function["arguments"] = json.loads(arguments)
        return {"id": call_id(number), **call, "type": "function", "function": function}

    def _reads_calls(self, tools: Tools) -> str:
        """Return the supported format of call arguments; raise ValueError if no format is supported."""
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
            question, turn = self.formed(_turn(""), tools)
            function = {"name": _name(tools), "arguments": arguments}
            turn["tool_calls"] = [{"id": call_id(1), "type": "function", "function": function}]
            try:
                text = self._apply([question, turn], tools, answers=False)
            except REFUSED:
                continue
            # Reject templates that print a Python dictionary, or escape JSON inside a JSON text.
            if FIRST in text and SECOND in text and not re.search(rf"'{FIRST}'|\\\"{FIRST}", text):
                yield form

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Tools, answers: bool) -> str:
        options = {"tools": list(tools)} if tools else {}
        return self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answers, **options, **self.variables
        )

    def _unused(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        """Create a marker word that occurs in no message, tool schema or template."""
        used = json.dumps([*messages, *tools, *self._texts], default=str)
        return next(word for number in count() if (word := f"qz{number}zq") not in used)


def call_id(number: int) -> str:
    """Make the id of a tool call, of nine letters and digits, as the templates of Mistral require."""
    return f"call{number:05}"


class Unreadable(ValueError):
    """A conversation that the chat template of a model does not support."""


def _turn(words: str) -> list[dict[str, Any]]:
    """Create two messages: a user question, and an assistant answer with the text `words`."""
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
    """Return whether a text contains a content block that was printed as Python or JSON."""
    return bool(re.search(rf"""['"]text\\?['"]\s*:\s*\\?['"]{FIRST}""", text))
