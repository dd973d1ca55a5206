"""Processors without models: a tokenizer that knows every control token, and a chat template."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, ProcessorMixin

from mmrl.core.types import Frames, Media, Message, Part, Prompt
from mmrl.vision.builders.tiny_models import tiny_tokenizer
from mmrl.vision.models.processor import PromptEncoder
from mmrl.vision.models.text_processor import TextProcessor

# Tokens as the families write them: <|end|>, <｜User｜>, <start_of_turn>, <turn|>, [/INST], </s>, <image>.
CONTROL = re.compile(
    r"<\|[a-zA-Z_]+\|>|<｜[^｜]+｜>|<[a-z]+_of_[a-z]+>|<\|[a-z]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
    r"|</s>|<image>|<video>"
)
BOS = "<BOS>"


@cache
def tokenizer_for(words: tuple[str, ...], eos: str):
    """Make a tokenizer that begins every sequence with BOS, as those of Gemma and Mistral do."""
    made = tiny_tokenizer(["the quick brown fox 0123456789"] * 4, 320)
    made.add_special_tokens({"bos_token": BOS, "eos_token": eos, "additional_special_tokens": list(words)})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)]
    )
    return made


class Seeing(ProcessorMixin):
    """A processor of transformers whose images and videos stay one token each, without pixels."""

    image_processor = SimpleNamespace(size={}, fetch_images=lambda images: images)
    video_processor = SimpleNamespace(size={}, fetch_videos=lambda videos, **options: (videos, None))

    def __init__(self, tokenizer, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)

    def _process_images(self, images, **options):
        return {}, []

    _process_videos = _process_images


def encoder_of(template: str, *, sees: bool, eos: str = "<eos>", **variables: object) -> PromptEncoder:
    """Make an encoder of prompts for a template, of a model that sees or reads text alone."""
    tokenizer = copy.deepcopy(tokenizer_for(tuple(sorted({*CONTROL.findall(template)} - {eos})), eos))
    if sees:
        processor = Seeing(tokenizer, chat_template=template)
    else:
        tokenizer.chat_template = template
        processor = TextProcessor(tokenizer)
    return PromptEncoder(processor, SimpleNamespace(config=LlamaConfig()), variables=variables)


def medium(kind: str) -> Media:
    """A black image, or a video of four frames."""
    pixels = torch.zeros(4 if kind == "video" else 1, 3, 28, 28, dtype=torch.uint8)
    return Media(kind, kind, lambda: Frames(pixels, torch.arange(len(pixels)).double(), float(len(pixels))))


def says(role: str, *parts: str | Media, extra: str = "") -> Message:
    """Write a message of texts and media."""
    made = tuple(Part(media=part) if isinstance(part, Media) else Part(part) for part in parts)
    return Message(role, made, extra=extra)


def plain(processor, prompt: Prompt, form: str, tools=(), **options: object) -> torch.Tensor | None:
    """Ask transformers for the ids (S,) of a prompt; None where it raises.

    Contents are given as "text", as "blocks", or as blocks with texts "merged", and the arguments of calls as
    JSON where the form names it. `options` are for `apply_chat_template`.
    """
    messages = []
    for message in prompt.messages:
        texts = [part.text for part in message.parts if not part.media]
        blocks = [
            {"type": part.media.kind, part.media.kind: part.media.load().pixels}
            if part.media
            else {"type": "text", "text": part.text}
            for part in message.parts
        ]
        if len(texts) == len(blocks) and form.startswith("merged"):
            blocks = [{"type": "text", "text": "".join(texts)}]
        as_text = form.startswith("text") and len(texts) == len(blocks)
        keys = message.keys
        for call in keys.get("tool_calls", ()) if form.endswith("json") else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        messages.append({"role": message.role, "content": "".join(texts) if as_text else blocks, **keys})
    owner = processor.tokenizer if isinstance(processor, TextProcessor) else processor
    options = {"add_generation_prompt": True, **({"tools": list(tools)} if tools else {}), **options}
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    try:
        return owner.apply_chat_template(messages, **options)["input_ids"][0]
    except Exception:
        return None


def templates() -> dict[str, str]:
    """Read the released templates that trl brings along, and the one in transformers, of SmolVLM's videos."""
    import trl
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    folder = Path(trl.__file__).parent / "chat_templates"
    released = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    return {**released, "smolvlm_video": DEFAULT_CHAT_TEMPLATE}
