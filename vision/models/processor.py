"""Prompt encoder of a model: token ids, positions and media tensors, chat template, end tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.byte_lru import ByteLRU
from mmrl.core.modalities import MODALITIES, digest_of
from mmrl.core.plain_text import PlainText, each_text, inside
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Message, Outcome, Part, Prompt, reading
from mmrl.kv_cache.layout import media_ids, placeholders
from mmrl.vision.models.chat_template import ChatTemplate, Tools
from mmrl.vision.models.listed_tools import listed_tools
from mmrl.vision.models.media_arguments import EDGES, about_short_videos, media_arguments, size_limits
from mmrl.vision.models.model_families import (
    TYPES_OF_TOKENS,
    check_length,
    check_sounds,
    family_of,
    num_positions,
    token_types,
)
from mmrl.vision.models.plain_inputs import check_ids, plain_inputs
from mmrl.vision.models.prompt_sources import PromptSources
from mmrl.vision.models.recorded_keys import check_keys, recorded_answer

CACHE_BYTES, REPLY_BYTES = 2 << 30, 1 << 28
FORMS = 32  # maximum number of prompt structures (roles, media) to compare with transformers, each once
OF_TOKENS = ("input_ids", "attention_mask", *TYPES_OF_TOKENS)
UNUSED = ("video_metadata", "timestamps", "labels")  # outputs of processors that are no model inputs
WITHOUT_BOS = {"text_kwargs": {"add_special_tokens": False}}


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as model inputs: `ids` (S,), rotary `positions` (A, S) with A axes, and `media` tensors."""

    uid: str
    ids: Tensor
    positions: Tensor
    media: dict[str, Tensor]

    @property
    def next_position(self) -> float:
        """Position of the first token of an answer: the largest position of all axes plus one."""
        return self.positions.max().item() + 1

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.ids, self.positions, *self.media.values()))


class PromptEncoder:
    """Encodes prompts with the processor of a model, with a cache of `CACHE_BYTES`.

    Args:
        processor: A processor of transformers.
        core: The model without its head.
        pixels: Size limits of the image processor, `shortest_edge` and `longest_edge` in pixels.
        variables: Variables of the chat template.
    """

    answers = True  # add the generation prompt after the messages

    def __init__(
        self,
        processor: Any,
        core: nn.Module,
        *,
        pixels: dict[str, int] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.processor, self.tokenizer, self.core = processor, processor.tokenizer, core
        self.family = family_of(core.config)
        self.pixels = {}
        if pixels:
            size = size_limits(processor.image_processor)
            if size.keys() != EDGES:
                raise ValueError(
                    f"`min_pixels` and `max_pixels` do not fit this model: it makes images of the size {size}"
                )
            self.pixels = {**size, **pixels}
        media = media_ids(core.config)
        # Tokens that answers must not contain, because the model would expect media for them.
        # Placeholders of Molmo2 and Kimi-K2.5 may lie outside of the output head's vocabulary.
        self.placeholders = [token for token in media if token < core.config.get_text_config().vocab_size]
        self.limit = num_positions(core.config)  # maximum number of tokens; other models may lower it
        self._answer_words = list(map(self.tokenizer.decode, media))
        self._words = self._media_words()
        self.plain = PlainText(self.tokenizer, self._words)
        self.template = ChatTemplate(processor, variables)
        self.ends = self.template.ends()
        self.end = self.ends.tokens
        self._keys: dict[str, bool] = {}  # (role, key) -> whether the template reads the key
        self._known: dict[str, bool] = {}  # (template, tools) -> whether the template lists them
        self._compared = set[Any]()  # prompt structures compared so far
        self._encoded: ByteLRU[EncodedPrompt] = ByteLRU(CACHE_BYTES, lambda encoded: encoded.bytes)
        self.sources = PromptSources()
        # Cached, since answers of a group often make the same tool call and get the same reply.
        self._replies: ByteLRU[dict[str, Tensor]] = ByteLRU(
            REPLY_BYTES, lambda inputs: sum(value.nbytes for value in inputs.values())
        )

    def encode(self, prompt: Prompt, tools: Tools = ()) -> EncodedPrompt:
        """Encode a prompt; raises `PromptError` if the model cannot read it.

        `tools` are JSON schemas of functions for `listed_tools`; empty: the prompt's own.
        """
        with reading(prompt):
            prompt, tools = listed_tools(self, prompt, tools)
            key = (prompt.uid, prompt.messages, json.dumps(tools))
            return self._encoded.get(key, lambda: self._encode(prompt, tools))

    def extend(
        self, encoded: EncodedPrompt, ids: Tensor, *replies: Message, tools: Tools = ()
    ) -> EncodedPrompt:
        """Append an answer (T,), replies, and the next generation prompt to an encoded prompt.

        Raises ValueError if media do not match their tokens, or if the model reads no media after an answer.
        """
        prompt = Prompt(encoded.uid, replies)
        if prompt.media and not self.family.media_in_replies:
            raise ValueError(
                f"models of type '{self.core.config.model_type}' cannot read media after an answer: "
                "images attend to each other, so the answer would change; show them in the prompt"
            )
        messages = self.plain.marked(list(map(template_message, replies)))
        after = self.plain.settled(self.template.after_answer(messages, self._marked(tools)))
        after, options = self.family.number(self.processor, torch.cat([encoded.ids, ids]), after)
        key = (after, *map(digest_of, prompt.media))
        inputs = self._replies.get(key, lambda: self._reply(prompt, after, options))
        new = inputs["input_ids"][0]
        new = new[self._ended(ids, new) :]
        media = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
        names = dict.fromkeys((*encoded.media, *media))
        pairs = {name: [both[name] for both in (encoded.media, media) if name in both] for name in names}
        media = {name: cat_padded(values) for name, values in pairs.items()}
        whole = torch.cat([encoded.ids, ids, new])
        types = token_types(self.core.config, whole)[None]
        tensors = {**media, "input_ids": whole[None], "mm_token_type_ids": types}
        return EncodedPrompt(encoded.uid, whole, self.family.positions(self.core, tensors), media)

    def _ended(self, ids: Tensor, new: Tensor) -> int:
        """Count the leading tokens of `new` (text after an answer) that the answer (T,) already ends with."""
        if not len(ids) or not len(new) or ids[-1] not in self.end:
            return 0
        before = self.ends.before
        if not self.ends.closes:
            return int(new[0] == ids[-1])
        return len(before) if new[: len(before)].tolist() == before else int(new[0] in self.end)

    def replies(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Convert messages of the role `tool` to a format that the chat template supports.

        If the template does not support tools, adjacent replies become one user message in the format of
        Qwen. Messages of other roles are not changed.
        """
        supported = self.knows_tools(tools) if tools else bool(self.template.reads("tool").forms)
        written = list[Message]()
        for role, group in groupby(messages, lambda message: message.role):
            if role != "tool":
                written += group
                continue
            if supported:
                block = self.template.reply_block
                written += (replace(reply, parts=within(block, reply.parts)) for reply in group)
                continue
            parts: list[Part] = []
            for reply in group:
                before = "\n" * bool(parts) + "<tool_response>\n"
                parts += [Part(before), *within("tool_response", reply.parts), Part("\n</tool_response>")]
            written.append(Message("user", _joined(parts)))
        return written

    def check_answer(self, text: str) -> None:
        """Raise ValueError for a recorded answer that contains a placeholder of media."""
        for word in self._answer_words:
            if word in text:
                raise ValueError(
                    f"the recorded answer {text[:80]!r} holds the media placeholder {word!r}, which no "
                    "answer may hold"
                )

    def answer(self, text: str) -> Tensor:
        """Tokenize an answer to (T,) with exactly one end token, even if the text already contains one."""
        self.check_answer(text)
        return torch.tensor([*self.plain.ids(self.without_end(text)), self.end[0]])

    def recorded(self, prompt: Prompt, outcome: Outcome) -> tuple[str, Tensor]:
        """Return the text and the tokens (T,) of a recorded answer; see `recorded_answer`."""
        return recorded_answer(self, prompt, outcome, self._keys)

    def rendered(self, messages: Sequence[Message], tools: Tools = (), *, answers: bool) -> str:
        """Render recorded turns; if `answers`, append the generation prompt."""
        return self._render(list(map(template_message, self.replies(messages, tools))), tools, answers)

    def without_end(self, text: str) -> str:
        """Remove the end token, and white space after it, from a recorded answer."""
        words = tuple(word for end in self.ends.tokens if (word := self.tokenizer.decode(end)).strip())
        bare = text.rstrip()
        return bare.removesuffix(next(w for w in words if bare.endswith(w))) if bare.endswith(words) else text

    def text(self, ids: Tensor) -> str:
        """Decode the tokens of an answer, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def knows_tools(self, tools: Tools) -> bool:
        """Return whether the chat template lists these tools in the prompt."""
        templates = [getattr(part, "chat_template", None) for part in (self.processor, self.tokenizer)]
        key = json.dumps([tools, templates])
        if key not in self._known:
            messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
            self._known[key] = self.template.render(messages, tools) != self.template.render(messages)
        return self._known[key]

    def written_call(self, name: str, arguments: Mapping[str, Any], tools: Tools) -> str:
        """Render a tool call with the chat template, as in the text of an answer."""
        question = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        turn = {"role": "assistant", "content": [], "tool_calls": [call]}
        # Remove everything up to the generation prompt, which may name the role.
        before, whole = self._render([question], tools), self._render([question, turn], tools, answers=False)
        after = whole[len(commonprefix([before, whole])) :]
        return self.text(torch.tensor(self.plain.tokenizer(after, add_special_tokens=False)["input_ids"]))

    def render(self, prompt: Prompt) -> str:
        """Decode the tokens of a prompt; placeholders of media become `<image: 64 tokens>`."""
        return self.transcript(self.encode(prompt).ids)

    def transcript(self, ids: Tensor) -> str:
        """Decode tokens (S,), including control tokens; media become `<image: 64 tokens>`."""
        kinds = {token: kind for kind, token in reversed(placeholders(self.core.config).items())}
        parts = []
        for kind, tokens in groupby(ids.tolist(), kinds.get):
            run = list(tokens)
            parts.append(f"<{kind}: {len(run)} tokens>" if kind else self.tokenizer.decode(run))
        return "".join(parts)

    def processor_inputs(self, prompt: Prompt, tools: Tools = ()) -> dict[str, Tensor]:
        """Run the processor on a prompt; return the inputs for the forward pass of the model."""
        messages = list(map(template_message, self.replies(prompt.messages, tools)))
        text = self.written(prompt, tools)
        # As in transformers, the tokenizer adds no BOS token if the template does.
        begun = text.startswith(self.tokenizer.bos_token or "\0")
        media = media_arguments(self.processor, prompt, self.pixels)
        inputs = self._inputs(prompt, text, WITHOUT_BOS if begun else {}, media)
        form = json.dumps((tools, *((m["role"], *m, *(b["type"] for b in m["content"])) for m in messages)))
        # Compare with transformers, except for texts with control tokens, which only here are plain text.
        alike = self.plain.mark not in text and self._marked(tools) == tuple(tools)
        if alike and form not in self._compared and len(self._compared) < FORMS:
            formed = self.template.formed(messages, tools)
            # Skip empty texts: transformers makes an empty list of them, which some templates print as [].
            if all(message["content"] or "tool_calls" in message for message in formed):
                given = {"add_generation_prompt": self.answers, **self.template.variables}
                plain = plain_inputs(self.processor, formed, tools, media, given)
                check_ids(prompt, inputs["input_ids"], plain, self.tokenizer)
                self._compared.add(form)
        return inputs

    def check_text(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt whose text contains a placeholder of media."""
        text = "\n".join(part.text for turn in prompt.messages for part in turn.parts if not part.quoted)
        for word in self._words:
            if word in text:
                raise ValueError(
                    f"the text of prompt '{prompt.uid}' holds the media placeholder {word!r}; "
                    "add the medium as a part of the message instead"
                )

    def written(self, prompt: Prompt, tools: Tools = ()) -> str:
        """Render a prompt with the chat template; raise ValueError if the template does not support it."""
        try:
            check_keys(prompt.messages, lambda turns: self._render(turns, tools, answers=False), self._keys)
            text = self.rendered(prompt.messages, tools, answers=self.answers)
            names = [tool.get("function", tool)["name"] for tool in tools] if self.knows_tools(tools) else []
            plain = filter(re.compile(r"[\w.-]+", re.ASCII).fullmatch, names)  # other names may be escaped
            if lost := [name for name in plain if name not in text]:
                roles = ", ".join(message.role for message in prompt.messages)
                raise ValueError(
                    f"the chat template of the model leaves out the tools {', '.join(lost)} beside messages "
                    f"of the roles {roles}; write what the system says into the question, or save the model "
                    "with a template that lists them"
                )
            return text
        except ValueError as error:
            raise ValueError(f"cannot encode prompt '{prompt.uid}': {error}") from error

    def _encode(self, prompt: Prompt, tools: Tools) -> EncodedPrompt:
        self.check_text(prompt)
        inputs = self.processor_inputs(prompt, tools)
        positions = self.family.positions(self.core, inputs)
        check_length(int(positions.max()) + 1, self.limit)
        media = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
        encoded = EncodedPrompt(prompt.uid, inputs["input_ids"][0], positions, media)
        return self.sources.add(encoded, prompt, tools)

    def _render(self, messages: list[dict[str, Any]], tools: Tools = (), answers: bool = True) -> str:
        """Render messages with the chat template; if `answers`, append the generation prompt.

        Control tokens inside texts are marked, so that `self.plain` tokenizes them as plain text.
        """
        marked = self.plain.marked(messages)
        return self.plain.settled(self.template.render(marked, self._marked(tools), answers=answers))

    def _marked(self, tools: Tools) -> Tools:
        """Mark control tokens in tool schemas, and break up tags that would close the block of schemas."""
        block = self.template.schema_block if tools else ""
        return tuple(self.plain.marked(each_text(tools, lambda text: inside(block, [text])[0])))

    def _reply(self, prompt: Prompt, text: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Run the processor on the text after an answer, without a BOS token."""
        media = media_arguments(self.processor, prompt, self.pixels)
        inputs, first = self._inputs(prompt, text, WITHOUT_BOS | options, media), self._always_first
        return {name: value[:, first:] if name in OF_TOKENS else value for name, value in inputs.items()}

    @cached_property
    def _always_first(self) -> int:
        """Number of tokens that the processor writes before every text: one in Molmo2, else none."""
        whole = self.processor(text=["x"], return_tensors="pt", **WITHOUT_BOS)["input_ids"]
        return len(whole[0]) - len(self.tokenizer("x", add_special_tokens=False)["input_ids"])

    def _inputs(
        self, prompt: Prompt, text: str, options: Mapping[str, Any], media: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Run the processor on a rendered text and the media of a prompt; `options` are for the tokenizer."""
        if "audio" in media:
            check_sounds(self.core.config)
        processor = self._reads_marks if self.plain.mark in text else self.processor
        try:
            inputs = dict(processor(text=[text], return_tensors="pt", **media, **options))
        except (ValueError, IndexError, StopIteration) as error:
            advice = about_short_videos(media)
            raise ValueError(f"cannot encode prompt '{prompt.uid}': {error}{advice}") from error
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items() if name not in UNUSED}
        inputs = self.family.prepare(self.family.adjust(self.processor, inputs, media))
        for token, features in self.family.features(self.core, inputs).items():
            count = int((inputs["input_ids"] == token).sum())
            if count != features:
                raise ValueError(
                    f"prompt '{prompt.uid}' has {count} placeholder tokens "
                    f"({self.tokenizer.decode(token)!r}) for {features} media features; "
                    "do its messages, template and media agree?"
                )
        return inputs

    def special_tokens(self) -> set[int]:
        """Return the ids of all special tokens, including added tokens that `all_special_ids` lacks."""
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}

    @cached_property
    def _reads_marks(self) -> Any:
        """The processor, with a tokenizer that accepts marked control tokens."""
        return self.plain.processor(self.processor)

    def _media_words(self) -> list[str]:
        """Return the texts of the media placeholders that the model or the processor uses."""
        words = [getattr(self.processor, f"{kind}_token", None) or "" for kind in MODALITIES]
        return [word for word in dict.fromkeys([*self._answer_words, *words]) if word]


def template_message(message: Message) -> dict[str, Any]:
    """Convert a message to the form that chat templates read."""
    return {"role": message.role, "content": [part.block for part in message.parts], **message.keys}


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Merge adjacent text blocks, because some templates strip white space from every block."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].media is None and part.media is None:
            part = Part(joined.pop().text + part.text)
        joined.append(part)
    return tuple(joined)


def within(block: str, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Break up tags named `block` in texts, so that no text closes the block around it; keep media."""
    return tuple(
        part if part.media else Part(text)
        for part, text in zip(parts, inside(block, [part.text for part in parts]), strict=True)
    )


def pixel_limits(options: Mapping[str, Any]) -> dict[str, int]:
    """Convert the options `min_pixels` and `max_pixels` to the size options of image processors."""
    named = {"shortest_edge": options.get("min_pixels"), "longest_edge": options.get("max_pixels")}
    return {name: value for name, value in named.items() if value is not None}
