"""Encoding prompts for a model: token ids, positions and media tensors; end and placeholder tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn

from mmrl.core.byte_lru import ByteLRU
from mmrl.core.plain_text import PlainText, block_after, each_text, inside, unused_marker
from mmrl.core.tensor import cat_padded
from mmrl.core.types import Media, Message, Part, Prompt, reading
from mmrl.kv_cache.layout import placeholder_ids
from mmrl.vision.models.model_families import check_length, family_of, token_types
from mmrl.vision.models.recorded_keys import check_keys

CACHE_BYTES = 2 << 30
REPLY_BYTES = 1 << 28
CALL_ID = "call00001"  # of every call: nine letters and figures, which Mistral's templates ask for
TICKS = 1000  # frame times are given to processors as frame numbers of a video with 1000 frames per second
EDGES = {"shortest_edge", "longest_edge"}
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
Tools = tuple[Mapping[str, Any], ...]  # JSON schemas of functions
UNUSED = ("video_metadata", "timestamps")  # outputs of processors that models do not take


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt as model inputs: `ids` (S,), rotary `positions` (A, S) on A axes, and `media` tensors."""

    uid: str
    ids: Tensor
    positions: Tensor
    media: dict[str, Tensor]

    @property
    def next_position(self) -> int:
        """Position of the first token of an answer: one more than the largest of all axes."""
        return int(self.positions.max()) + 1

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.ids, self.positions, *self.media.values()))


class PromptEncoder:
    """Encodes prompts with the processor of a model, and keeps the latest in a cache of `CACHE_BYTES`.

    Args:
        processor: A processor of transformers.
        core: The model without its head.
        pixels: Limits of the image processor, as `shortest_edge` and `longest_edge` in pixels.
    """

    def __init__(self, processor: Any, core: nn.Module, *, pixels: dict[str, int] | None = None) -> None:
        self.processor, self.tokenizer, self.core = processor, processor.tokenizer, core
        self.pixels = {}
        if pixels:
            size = _size_limits(processor.image_processor)
            if size.keys() != EDGES:
                raise ValueError(
                    f"`min_pixels` and `max_pixels` do not fit this model: it makes images of the size {size}"
                )
            self.pixels = {**size, **pixels}
        # No answer may contain these: the model would expect media for them.
        self.placeholders = placeholder_ids(core.config, ("image", "video", "vision_start", "vision_end"))
        self._words = self._media_words()
        self._answer_words = list(map(self.tokenizer.decode, self.placeholders))
        self.plain = PlainText(self.tokenizer, self._words)
        self.end = self._end_tokens()
        self._keys: dict[str, bool] = {}  # whether a template reads a key of recorded turns
        self._known: dict[str, bool] = {}  # whether a template tells about tools, by both
        self._encoded: ByteLRU[EncodedPrompt] = ByteLRU(CACHE_BYTES, lambda encoded: encoded.bytes)
        # Answers of a group often call a tool alike, and are shown the same.
        self._replies: ByteLRU[dict[str, Tensor]] = ByteLRU(
            REPLY_BYTES, lambda inputs: sum(value.nbytes for value in inputs.values())
        )

    def encode(self, prompt: Prompt, tools: Tools = ()) -> EncodedPrompt:
        """Encode a prompt. Raises `PromptError` for one that the model cannot read.

        `tools` are JSON schemas of functions, which the chat template tells the model about.
        """
        key = (prompt.uid, prompt.messages, json.dumps(tools))
        with reading(prompt):
            return self._encoded.get(key, lambda: self._encode(prompt, tools))

    def extend(self, encoded: EncodedPrompt, ids: Tensor, *replies: Message) -> EncodedPrompt:
        """Append an answer (T,) and replies to it, and begin the next answer in the template's own words.

        Raises ValueError where media do not fit their tokens.
        """
        prompt = Prompt(encoded.uid, replies)
        marker = unused_marker([prompt.text])
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": marker}]},
            *map(template_message, replies),
        ]
        after = self._render(messages).rpartition(marker)[2]
        inputs = self._replies.get((after, *map(_digest, prompt.media)), lambda: self._reply(prompt, after))
        new = inputs["input_ids"][0]
        if len(ids) and ids[-1] in self.end and new[0] in self.end:
            new = new[1:]  # the answer has written the end token itself
        media = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
        names = dict.fromkeys((*encoded.media, *media))
        pairs = {name: [both[name] for both in (encoded.media, media) if name in both] for name in names}
        media = {name: cat_padded(values) for name, values in pairs.items()}
        whole = torch.cat([encoded.ids, ids, new])
        types = token_types(self.core.config, whole)
        inputs = {**media, "input_ids": whole[None], "mm_token_type_ids": types[None]}
        positions = family_of(self.core.config).positions(self.core, inputs)
        return EncodedPrompt(encoded.uid, whole, positions, media)

    def replies(self, messages: Sequence[Message], tools: Tools = ()) -> list[Message]:
        """Write replies of tools, messages of the role `tool`, so that the chat template has words for them.

        Those that follow each other become one message of the user, in Qwen's words, where the template knows
        no tools; other messages stay.
        """
        known, written = self.knows_tools(tools), list[Message]()
        for role, group in groupby(messages, lambda message: message.role):
            if role != "tool":
                written += group
                continue
            if known:
                written += (replace(reply, parts=within(self._reply_block, reply.parts)) for reply in group)
                continue
            parts: list[Part] = []
            for reply in group:
                before = "\n" * bool(parts) + "<tool_response>\n"
                parts += [Part(before), *within("tool_response", reply.parts), Part("\n</tool_response>")]
            written.append(Message("user", tuple(parts)))
        return written

    def check_answer(self, text: str) -> None:
        """Raise ValueError for a recorded answer with a placeholder of media."""
        for word in self._answer_words:
            if word in text:
                raise ValueError(
                    f"the recorded answer {text[:80]!r} holds the media placeholder {word!r}, which no "
                    "answer may hold"
                )

    def answer(self, text: str) -> Tensor:
        """Tokenize an answer, with its end token: (T,)."""
        self.check_answer(text)
        return torch.tensor([*self.plain.ids(text), self.end[0]])

    def text(self, ids: Tensor) -> str:
        """Decode the tokens of an answer."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def knows_tools(self, tools: Tools) -> bool:
        """Return whether the chat template tells the model about tools."""
        templates = [getattr(part, "chat_template", None) for part in (self.processor, self.tokenizer)]
        key = json.dumps([tools, templates])
        if key not in self._known:
            messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
            self._known[key] = self._render(messages, tools) != self._render(messages)
        return self._known[key]

    def written_call(self, name: str, arguments: Mapping[str, Any], tools: Tools) -> str:
        """Write a call of a tool in the words of the chat template, as the text of an answer has it."""
        asked = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        turns = [asked, _call(name, arguments)]
        # Without what begins an answer, such as the name of its role, which no answer has.
        before, whole = self._render([asked], tools), self._render(turns, tools, answers=False)
        after = whole[len(commonprefix([before, whole])) :]
        return self.text(torch.tensor(self.plain.tokenizer(after, add_special_tokens=False)["input_ids"]))

    def render(self, prompt: Prompt) -> str:
        """Decode a prompt as the model reads it; placeholders of media become `<image: 64 tokens>`."""
        return self.transcript(self.encode(prompt).ids)

    def transcript(self, ids: Tensor) -> str:
        """Decode tokens (S,) with the marks of the template; media become `<image: 64 tokens>`."""
        config = self.core.config
        kinds = {token: kind for kind in ("image", "video") for token in placeholder_ids(config, (kind,))}
        parts = []
        for kind, tokens in groupby(ids.tolist(), kinds.get):
            run = list(tokens)
            parts.append(f"<{kind}: {len(run)} tokens>" if kind else self.tokenizer.decode(run))
        return "".join(parts)

    def processor_inputs(self, prompt: Prompt, tools: Tools = ()) -> dict[str, Tensor]:
        """Give the outputs of the processor for a prompt: what the forward pass of transformers takes."""
        return self._inputs(prompt, self.written(prompt, tools), {})

    def check_text(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt whose text holds a placeholder of media."""
        asked = "\n".join(part.text for turn in prompt.messages for part in turn.parts if not part.said)
        for word in self._words:
            if word in asked:
                raise ValueError(
                    f"the text of prompt '{prompt.uid}' holds the media placeholder {word!r}; "
                    "add the image or video as a part of the message instead"
                )

    def written(self, prompt: Prompt, tools: Tools = ()) -> str:
        """Write a prompt in the words of the chat template; raises ValueError where that refuses it."""
        try:
            check_keys(prompt.messages, lambda turns: self._render(turns, tools, answers=False), self._keys)
            return self._render(list(map(template_message, self.replies(prompt.messages, tools))), tools)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template of the model does not take it: {error}") from error

    def _encode(self, prompt: Prompt, tools: Tools) -> EncodedPrompt:
        self.check_text(prompt)
        inputs = self._inputs(prompt, self.written(prompt, tools), {})
        positions = family_of(self.core.config).positions(self.core, inputs)
        check_length(int(positions.max()) + 1, self.core.config)
        media = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
        return EncodedPrompt(prompt.uid, inputs["input_ids"][0], positions, media)

    def _render(self, messages: list[dict[str, Any]], tools: Tools = (), answers: bool = True) -> str:
        """Write messages in the words of the chat template, and what begins an answer if one `answers`.

        The texts are marked where they hold a control word, for `self.plain`.
        """
        part = lambda text: inside(self._schema_block, [text])[0]
        options = {"tools": self.plain.marked(each_text(tools, part))} if tools else {}
        rendered = self.processor.apply_chat_template(
            self.plain.marked(messages), tokenize=False, add_generation_prompt=answers, **options
        )
        return self.plain.settled(rendered)

    def _reply(self, prompt: Prompt, text: str) -> dict[str, Tensor]:
        """Run the processor on what follows an answer; the tokenizer must not begin a sequence."""
        return self._inputs(prompt, text, {"text_kwargs": {"add_special_tokens": False}})

    def _inputs(self, prompt: Prompt, text: str, options: dict[str, Any]) -> dict[str, Tensor]:
        """Run the processor on a rendered text and the media of a prompt; `options` are for the tokenizer."""
        arguments = self._media_arguments(prompt)
        processor = self._reads_marks if self.plain.mark in text else self.processor
        try:
            inputs = dict(processor(text=[text], return_tensors="pt", **arguments, **options))
        except (ValueError, IndexError, StopIteration) as error:
            raise ValueError(f"cannot encode prompt '{prompt.uid}': {error}") from error
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items() if name not in UNUSED}
        for token, features in family_of(self.core.config).features(self.core, inputs).items():
            count = int((inputs["input_ids"] == token).sum())
            if count != features:
                raise ValueError(
                    f"prompt '{prompt.uid}' has {count} placeholder tokens "
                    f"({self.tokenizer.decode(token)!r}) for {features} media features; "
                    "do its messages, template and media agree?"
                )
        return inputs

    def _media_arguments(self, prompt: Prompt) -> dict[str, Any]:
        """Load the media of a prompt as arguments of the processor."""
        from transformers.video_utils import VideoMetadata

        loaded = [(medium.kind, medium.load()) for medium in prompt.media]
        images = [frames.pixels[0] for kind, frames in loaded if kind == "image"]
        videos = [frames for kind, frames in loaded if kind == "video"]
        arguments: dict[str, Any] = {}
        if images:
            # Processors take a list of images for each text.
            arguments |= {"images": [images], "images_kwargs": {"size": self.pixels} if self.pixels else {}}
        if videos:
            processor = getattr(self.processor, "video_processor", None)
            if processor is None:
                raise ValueError(f"prompt '{prompt.uid}' shows a video, but this model takes images only")
            # Frames were sampled when the video was decoded; the processor only needs their times.
            metadata = []
            for video in videos:
                times = video.times.tolist()
                # Processors divide the covered time by the number of frames, for the seconds per frame.
                covered = len(times) * (times[1] - times[0]) if len(times) > 1 else video.duration
                frames, ticks = [round(t * TICKS) for t in times], max(1, round(covered * TICKS))
                metadata.append(
                    VideoMetadata(
                        total_num_frames=ticks, fps=TICKS, frames_indices=frames, duration=video.duration
                    )
                )
            options = {"video_metadata": metadata, "do_sample_frames": False, "return_metadata": True}
            size = _size_limits(processor)
            if size.keys() == EDGES:
                # Processors must not enlarge frames, which would undo the data's pixel budget (Qwen does).
                smallest = (processor.patch_size * processor.merge_size) ** 2
                options["size"] = {**size, "shortest_edge": min(size["shortest_edge"], smallest)}
            arguments |= {"videos": [video.pixels for video in videos], "videos_kwargs": options}
        return arguments

    def _end_tokens(self) -> list[int]:
        """List the tokens that end an answer, first that of the chat template, then the tokenizer's.

        The checkpoint's generation_config is not read.
        """
        marker = "\x02"  # what the template writes after the answer comes after this
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": marker}]},
        ]
        rendered = self.processor.apply_chat_template(messages, tokenize=False)
        after = self.tokenizer(rendered.rpartition(marker)[2], add_special_tokens=False)["input_ids"]
        special = self.special_tokens()
        ends = [token for token in after[:2] if token in special][:1] + [self.tokenizer.eos_token_id]
        ends = list(dict.fromkeys(token for token in ends if token is not None))
        if not ends:
            raise ValueError("the tokenizer names no token that ends an answer; set its eos_token")
        return ends

    def special_tokens(self) -> set[int]:
        """List the special tokens; `all_special_ids` has only those that the tokenizer names."""
        added = self.tokenizer.added_tokens_decoder
        return {*self.tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}

    @cached_property
    def _reads_marks(self) -> Any:
        """The processor of marked texts."""
        return self.plain.processor(self.processor)

    @cached_property
    def _reply_block(self) -> str:
        """The block in which the chat template writes the reply of a tool; empty where it has none."""
        marker = unused_marker(())
        asked = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        reply = template_message(Message("tool", (Part(marker),)))
        for turns in ([asked, _call("x", {}), reply], [asked, reply]):
            try:
                return block_after(self._render(turns, answers=False).partition(marker)[2])
            except (TemplateError, TypeError):  # no words for such turns
                continue
        return ""

    @cached_property
    def _schema_block(self) -> str:
        """The block in which the chat template lists tools; empty where it has none."""
        asked = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        marker = unused_marker(())
        function = {"name": "x", "description": marker, "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        written = self.processor.apply_chat_template([asked], tokenize=False, tools=tools)
        return block_after(written.partition(marker)[2])

    def _media_words(self) -> list[str]:
        """List the words that stand for media, of the model and, where these differ, of the processor."""
        words = [self.tokenizer.decode(token) for token in self.placeholders]
        words += [getattr(self.processor, f"{kind}_token", None) or "" for kind in ("image", "video")]
        return [word for word in dict.fromkeys(words) if word]


def _digest(medium: Media) -> bytes:
    """Hash what an image or a video shows, and when."""
    frames = medium.load()
    digest = hashlib.blake2b(repr((medium.kind, frames.pixels.shape, frames.duration)).encode())
    for tensor in (frames.pixels, frames.times):
        digest.update(tensor.contiguous().numpy())
    return digest.digest()


def template_message(message: Message) -> dict[str, Any]:
    """Convert a message to the form that chat templates read."""
    content = [
        {"type": part.media.kind} if part.media else {"type": "text", "text": part.text}
        for part in message.parts
    ]
    # Mistral's templates want the id of a call, and of the call that a tool answers.
    keys = ({"tool_call_id": CALL_ID} if message.role == "tool" else {}) | message.keys
    if "tool_calls" in keys:
        keys["tool_calls"] = [{"id": CALL_ID} | call for call in keys["tool_calls"]]
    return {"role": message.role, "content": content, **keys}


def within(block: str, parts: Sequence[Part]) -> tuple[Part, ...]:
    """Part the marks of a block in the texts of a message that stand inside of it; media stay."""
    return tuple(
        part if part.media else Part(text)
        for part, text in zip(parts, inside(block, [part.text for part in parts]), strict=True)
    )


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write a turn of the model that calls a tool and says nothing, in the form that chat templates read."""
    made = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}, "id": CALL_ID}
    return {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [made]}


def pixel_limits(options: Mapping[str, Any]) -> dict[str, int]:
    """Name the options `min_pixels` and `max_pixels` of a policy as image processors do."""
    named = {"shortest_edge": options.get("min_pixels"), "longest_edge": options.get("max_pixels")}
    return {name: value for name, value in named.items() if value is not None}


def _size_limits(processor: Any) -> dict[str, int]:
    """Read the limits on size that an image or video processor has set."""
    return {name: value for name, value in dict(processor.size).items() if value}
