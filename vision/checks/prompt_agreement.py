"""Startup check that prompts have the same tokens as with transformers' own processor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.core.types import Message, Prompt
from mmrl.diagnostics.context import Examined, Finding, spelled
from mmrl.vision.models.media_arguments import media_arguments
from mmrl.vision.models.model_families import family_of
from mmrl.vision.models.plain_inputs import first_difference, plain_inputs
from mmrl.vision.models.processor import UNUSED, PromptEncoder

TAKEN_AS_BLOCKS = ("'type': 'text'", '"type": "text"')  # signs that a template printed content blocks as text


@check(on="start")
def prompt_agreement(examined: Examined, *, prompts: PositiveInt = 8) -> Iterator[Finding]:
    """Check that prompts have the same tokens as `processor.apply_chat_template` of transformers.

    The conversation is rebuilt from the prompt. The content of each message is a text or a list of blocks,
    whichever the template renders completely. Prompts with tool replies are skipped, and so are texts that
    contain control tokens, which this library encodes as ordinary text. The check also reports faults of the
    template itself: a prompt that begins with the same special token twice or ends with the end of an answer,
    and a generation_config whose end tokens differ from the template's.

    Args:
        prompts: Number of prompts to compare; prompts of different structure come first.
    """
    encoder: Any = getattr(examined.policy, "prompt_encoder", None)
    if not isinstance(encoder, PromptEncoder):
        return
    forms = {
        tuple((m.role, *(bool(p.media) for p in m.parts)) for m in p.messages): p for p in examined.prompts
    }
    chosen = {prompt.uid: prompt for prompt in (*forms.values(), *examined.prompts)}
    for prompt in list(chosen.values())[:prompts]:
        plain = as_transformers(encoder, prompt)
        ids = encoder.encode(prompt).ids
        wrong = _wrong_marks(encoder, ids)
        if plain and (difference := first_difference(ids, plain["input_ids"][0], encoder.tokenizer)):
            wrong = f"is not what transformers makes of its messages: {difference}"
        if wrong:
            yield Finding(
                f"prompt '{prompt.uid}' {wrong}",
                "see that chat template, tokenizer and processor are the model's own and of one release",
            )
            return
    config = getattr(getattr(examined.policy, "model", None), "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    named = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if named and not {*named} & {*encoder.end}:
        words = [[encoder.tokenizer.decode(token) for token in ids] for ids in (encoder.end, named)]
        yield Finding(
            f"answers end with {spelled(words[0])}, and the generation_config of the model names "
            f"{spelled(words[1])}: whoever serves the trained model would not stop at the end of an answer",
            "set `eos_token_id` in generation_config.json to the tokens that the chat template writes",
        )


def _wrong_marks(encoder: PromptEncoder, ids: Tensor) -> str:
    """Describe what is wrong with the first or last tokens of a prompt (S,); empty if nothing is wrong."""
    first, words = ids[:2].tolist(), encoder.tokenizer.decode
    special = encoder.special_tokens().difference(encoder.placeholders)  # a prompt may begin with two images
    if len(first) == 2 and first[0] == first[1] and first[0] in special:
        return f"begins with {words(first[0])!r} twice"
    last = next((token for token in reversed(ids.tolist()) if words(token).strip()), None)
    if last in encoder.end:
        return f"ends with {words(last)!r}, the end of an answer: nothing begins an answer after it"
    return ""


def as_transformers(encoder: PromptEncoder, prompt: Prompt) -> dict[str, Tensor]:
    """Encode a prompt with transformers, in the content format for which the template shows all texts.

    Returns an empty dictionary for tool replies and for texts that contain control tokens, which `encoder`
    treats as ordinary text. Raises ValueError if transformers accepts no content format.
    """
    if encoder.plain.pattern.search(prompt.text) or any(m.role == "tool" for m in prompt.messages):
        return {}
    media = media_arguments(encoder.processor, prompt, encoder.pixels)
    roles = list(dict.fromkeys(message.role for message in prompt.messages))
    # Try content blocks first for models with an image processor.
    order = ("text", "blocks") if encoder.processor.image_processor is None else ("blocks", "text")
    best, fewest, error = dict[str, Tensor](), len(prompt.messages) + 1, Exception()
    for forms in product((*order, "merged"), repeat=len(roles)):
        of_role = dict(zip(roles, forms, strict=True))
        messages = [_message(message, of_role[message.role]) for message in prompt.messages]
        try:
            inputs = plain_inputs(encoder.processor, messages, (), media, encoder.template.variables)
        except Exception as refused:  # templates raise any exception
            error = refused
            continue
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items() if name not in UNUSED}
        inputs = family_of(encoder.core.config).adjust(encoder.processor, inputs, media)
        shown = encoder.tokenizer.decode(inputs["input_ids"][0])
        lost = sum(_lost(message, shown) for message in prompt.messages)
        if lost < fewest:
            best, fewest = inputs, lost
        if not lost:
            break
    if not best:
        raise ValueError(f"transformers takes no form of prompt '{prompt.uid}': {error}") from error
    return best


def _message(message: Message, form: str) -> dict[str, Any]:
    blocks = [
        {"type": part.media.kind} if part.media else {"type": "text", "text": part.text}
        for part in message.parts
    ]
    media = [block for block in blocks if block["type"] != "text"]
    if form == "merged" and not media:
        blocks = [{"type": "text", "text": message.text}]
    as_text = form == "text" and not media
    return {"role": message.role, "content": message.text if as_text else blocks, **message.keys}


def _lost(message: Message, shown: str) -> bool:
    """Whether the rendered prompt `shown` lacks a text of a message, or shows blocks as Python or JSON."""
    texts = [part.text.strip() for part in message.parts if part.media is None]
    printed = any(word in shown and word not in message.text for word in TAKEN_AS_BLOCKS)
    return printed or any(text not in shown for text in texts)
