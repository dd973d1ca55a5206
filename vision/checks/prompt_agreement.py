"""Check at the start: prompts are what the model's own chat template and processor make of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.core.types import Message, Prompt
from mmrl.diagnostics.context import Examined, Finding
from mmrl.vision.models.media_arguments import media_arguments
from mmrl.vision.models.plain_inputs import first_difference, plain_inputs
from mmrl.vision.models.processor import UNUSED, PromptEncoder

TAKEN_AS_BLOCKS = ("'type': 'text'", '"type": "text"')  # what is left of blocks that a template prints


@check(on="start")
def prompt_agreement(examined: Examined, *, prompts: PositiveInt = 8) -> Iterator[Finding]:
    """Check that prompts have the tokens of `processor.apply_chat_template` of transformers.

    The conversation is made anew from the prompt, with each message as a text or as blocks, whichever the
    template writes in full. Not asked of tools, and of texts that hold control tokens, which are words here.

    Args:
        prompts: Prompts that are compared, of different forms first.
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
        if plain and (difference := first_difference(ids, plain["input_ids"][0], encoder.tokenizer)):
            yield Finding(
                f"prompt '{prompt.uid}' is not what transformers makes of its messages: {difference}",
                "see that chat template, tokenizer and processor are the model's own and of one release",
            )
            return


def as_transformers(encoder: PromptEncoder, prompt: Prompt) -> dict[str, Tensor]:
    """Ask transformers for the inputs of a prompt, in the forms of contents in which it shows all texts.

    Empty for replies of tools, and for texts that hold control tokens, which are words to `encoder`. Raises
    ValueError where transformers takes no form.
    """
    if encoder.plain.pattern.search(prompt.text) or any(m.role == "tool" for m in prompt.messages):
        return {}
    media = media_arguments(encoder.processor, prompt, encoder.pixels)
    roles = list(dict.fromkeys(message.role for message in prompt.messages))
    # Blocks first where a model sees.
    order = ("text", "blocks") if encoder.processor.image_processor is None else ("blocks", "text")
    best, fewest, error = dict[str, Tensor](), len(prompt.messages) + 1, Exception()
    for forms in product((*order, "merged"), repeat=len(roles)):
        of_role = dict(zip(roles, forms, strict=True))
        messages = [_message(message, of_role[message.role]) for message in prompt.messages]
        try:
            made = plain_inputs(encoder.processor, messages, (), media)
        except Exception as refused:  # whatever a template raises for contents that it does not take
            error = refused
            continue
        made = {name: torch.as_tensor(value) for name, value in made.items() if name not in UNUSED}
        shown = encoder.tokenizer.decode(made["input_ids"][0])
        lost = sum(_lost(message, shown) for message in prompt.messages)
        if lost < fewest:
            best, fewest = made, lost
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
    """Whether a text of a message is not shown, or stands in the words of Python."""
    texts = [part.text.strip() for part in message.parts if part.media is None]
    printed = any(word in shown and word not in message.text for word in TAKEN_AS_BLOCKS)
    return printed or any(text not in shown for text in texts)
