"""Rows of recorded conversations for supervised fine-tuning: one answer, all answers or all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core.types import CHANGED, Message, Outcome, Part, Prompt, Trajectory, Transcript, reading
from mmrl.kv_cache.layout import media_ids
from mmrl.vision.decoding.token_steps import Suffix, TokenRow
from mmrl.vision.models.model_families import check_length, check_max_length
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.tools.call_formats import encode_transcript


def recorded_row(
    encoder: PromptEncoder, prompt: Prompt, outcome: Outcome, *, learn: str, max_length: int = 0
) -> Trajectory:
    """Encode a conversation with a recorded answer as a row; the learned tokens are its steps.

    Args:
        encoder: The encoder of the model.
        prompt: The conversation before the answer.
        outcome: The recorded answer, a text.
        learn: "completion": the answer; "assistant": all turns of the assistant, each rendered as the last
            one; "all": all tokens, except the first, which nothing predicts, and placeholders of media.
        max_length: Maximum number of tokens of the row, media included; 0: no limit.

    Raises:
        PromptError: The row is too long, the answer is an image, or a turn cannot be encoded.
    """
    with reading(prompt):
        if outcome.text is None and not outcome.extra:
            raise ValueError("its recorded answer is no text; `max_length` and the choice of tokens need one")
        answer = Message("assistant", (Part(outcome.text or ""),), outcome.extra)
        messages = (*prompt.messages, answer)
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        turns = _turns(encoder, prompt, messages, places if learn == "assistant" else places[-1:])
        read, last = turns[-1]
        length = len(read.ids) + len(last)
        check_length(read.next_position + len(last) - 1, encoder.limit)
        check_max_length(length, max_length)
        row = _whole(encoder, *turns[0]) if learn == "all" else TokenRow.of_turns(turns)
    tags = {"finish": "stop", **outcome.tags, **({CHANGED: "yes"} if row.suffix else {})}
    shown = Outcome(encoder.text(last), end=len(row.ids), tags=tags, recorded=outcome.recorded)
    notes = {"token": row.ids}
    return Trajectory(prompt, prompt.uid, (shown,), row, len(row.ids), notes, on_policy=False)


def _turns(
    encoder: PromptEncoder, prompt: Prompt, messages: Sequence[Message], places: Sequence[int]
) -> list[tuple[EncodedPrompt, Tensor]]:
    """Return the input and the tokens (t,) of the assistant's turns at `places` in a conversation."""
    ids, replies = [], []
    for at, end in zip(places, [*places[1:], len(messages)], strict=True):
        message = messages[at]
        if any(part.media for part in message.parts):
            raise ValueError("a turn of the assistant shows media; only texts can be learned")
        before = replace(prompt, messages=tuple(messages[:at]))
        ids.append(encoder.recorded(before, Outcome(message.text, extra=message.extra))[1])
        replies.append(tuple(messages[at + 1 : end]))
    if not all(replies[:-1]):
        raise ValueError("two turns of the assistant follow each other; join them to one turn")
    script = Transcript((), tuple(ids), tuple(replies[:-1]))
    return encode_transcript(encoder, replace(prompt, messages=tuple(messages[: places[0]])), script)


def _whole(encoder: PromptEncoder, prompt: EncodedPrompt, answer: Tensor) -> TokenRow:
    """Make a row whose steps are all tokens of a prompt and its answer, except placeholders of media."""
    config = encoder.core.config
    hidden = torch.tensor(media_ids(config), dtype=torch.int64)
    if encoder.family.prefix_lm or torch.isin(prompt.ids[0], hidden):
        raise ValueError(
            f"prompts of a model of type '{config.model_type}' cannot be learned: tokens attend to each "
            "other, or begin with an image; set `completion_only_loss: true`"
        )
    after = Suffix.answer(prompt, answer)
    ids, positions = torch.cat([prompt.ids, answer]), torch.cat([prompt.positions, after.positions], 1)
    chosen = (~torch.isin(ids[1:], hidden)).nonzero()[:, 0]
    first = EncodedPrompt(prompt.uid, ids[:1], positions[:, :1], {})
    return TokenRow(first, ids[1:][chosen], suffix=Suffix(ids[1:], positions[:, 1:], chosen, prompt.media))
