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
from mmrl.diagnostics.context import Examined, Finding, spelled
from mmrl.vision.models.media_arguments import media_arguments
from mmrl.vision.models.plain_inputs import first_difference, plain_inputs
from mmrl.vision.models.processor import UNUSED, PromptEncoder

TAKEN_AS_BLOCKS = ("'type': 'text'", '"type": "text"')  # what is left of blocks that a template prints


@check(on="start")
def prompt_agreement(examined: Examined, *, prompts: PositiveInt = 8) -> Iterator[Finding]:
    """Check that prompts have the tokens of `processor.apply_chat_template` of transformers.

    The conversation is made anew from the prompt, with each message as a text or as blocks, whichever the
    template writes in full. Not asked of tools, and of texts that hold control tokens, which are words here.
    What transformers itself would get wrong is looked at too: a prompt that begins twice or ends as an answer
    does, and a generation_config that ends answers otherwise than the template.

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
    """Say what is wrong with the first and the last tokens of a prompt (S,); empty where nothing is."""
    first, words = ids[:2].tolist(), encoder.tokenizer.decode
    special = encoder.special_tokens().difference(encoder.placeholders)  # images may begin a prompt
    if len(first) == 2 and first[0] == first[1] and first[0] in special:
        return f"begins with {words(first[0])!r} twice"
    last = next((token for token in reversed(ids.tolist()) if words(token).strip()), None)
    if last in encoder.end:
        return f"ends with {words(last)!r}, the end of an answer: nothing begins an answer after it"
    return ""


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
