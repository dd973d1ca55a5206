"""Check at the start: prompts begin and end as the model's chat template and tokenizer mean them to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding, spelled
from mmrl.vision.models.plain_inputs import OtherTokens
from mmrl.vision.models.processor import PromptEncoder


@check(on="start")
def prompt_agreement(examined: Examined, *, prompts: PositiveInt = 8) -> Iterator[Finding]:
    """Check that prompts have the tokens of `processor.apply_chat_template` of transformers.

    Also finds what transformers itself would get wrong: a prompt that begins with two BOS tokens or ends with
    the end of an answer, and a generation_config whose end tokens differ from those of the chat template.

    Args:
        prompts: Number of prompts to compare; prompts with different roles and media come first.
    """
    encoder: Any = getattr(examined.policy, "prompt_encoder", None)
    if not isinstance(encoder, PromptEncoder):
        return
    forms = {
        tuple((m.role, *(bool(p.media) for p in m.parts)) for m in p.messages): p for p in examined.prompts
    }
    chosen = {prompt.uid: prompt for prompt in (*forms.values(), *examined.prompts)}
    for prompt in list(chosen.values())[:prompts]:
        try:
            fault = wrong_marks(encoder, prompt.uid, encoder.encode(prompt).ids)
        except OtherTokens as error:  # `encode` compares with transformers
            fault = str(error)
        if fault:
            advice = "see that chat template, tokenizer and processor are the model's own and of one release"
            yield Finding(fault, advice)
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


def wrong_marks(encoder: PromptEncoder, uid: str, ids: Tensor) -> str:
    """Describe a wrong first or last token of a prompt (S,); empty if both are right."""
    first, words = ids[:2].tolist(), encoder.tokenizer.decode
    special = encoder.special_tokens().difference(encoder.placeholders)  # images may begin a prompt
    if len(first) == 2 and first[0] == first[1] and first[0] in special:
        return f"prompt '{uid}' begins with {words(first[0])!r} twice"
    last = next((token for token in reversed(ids.tolist()) if words(token).strip()), None)
    if last in encoder.end:
        end = f"{words(last)!r}, the end of an answer"
        return f"prompt '{uid}' ends with {end}: nothing begins an answer after it"
    return ""
