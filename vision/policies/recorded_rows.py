"""Encoding of recorded answers as trajectories: single answers, and conversations with replies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmrl.core.types import CHANGED, Message, Outcome, Part, Prompt, Trajectory, Transcript
from mmrl.kv_cache.layout import media_ids
from mmrl.vision.decoding.token_steps import Suffix, TokenRow
from mmrl.vision.models.model_families import check_max_length
from mmrl.vision.models.processor import EncodedPrompt, PromptEncoder
from mmrl.vision.models.recorded_turns import encode_recorded


def recorded_row(
    encoder: PromptEncoder,
    prompt: Prompt,
    outcome: Outcome,
    *,
    learn: str = "completion",
    max_length: int = 0,
) -> Trajectory:
    """Encode a recorded answer as a trajectory whose steps are the tokens to train on.

    Every turn ends with its end token. Messages between turns are context, not trained on. The outcome is
    the last turn with the earlier `turns`, but without `asked` (the prompt with media of this answer only),
    so that engines can encode it after a prompt with other media. Raises ValueError for an unreadable answer.

    Args:
        encoder: The encoder of the model.
        prompt: The conversation before the answer.
        outcome: The recorded answer with its `turns`.
        learn: "completion": the assistant's turns of the answer; "assistant": also those of the prompt, each
            rendered as the last one; "all": all tokens, except the first, which nothing predicts, and
            placeholders of media.
        max_length: Maximum number of tokens of the row, media included; 0: no limit.
    """
    if (max_length or learn != "completion") and outcome.text is None and not outcome.extra:
        raise ValueError("its recorded answer is no text; `max_length` and the choice of tokens need one")
    begun = _from_first_turn(prompt, outcome) if learn == "assistant" else (prompt, outcome)
    texts, turns, replies = encode_recorded(encoder, *begun)
    # Store tool calls as text, so that the answer can also be encoded after a prompt without tools.
    words, text = iter(texts), texts[-1]
    messages = [Message(t.role, (Part(next(words)),)) if t.role == "assistant" else t for t in begun[1].turns]
    read, last = turns[-1]
    check_max_length(len(read.ids) + len(last), max_length)
    row = _whole(encoder, read, last) if learn == "all" else TokenRow.of_turns(turns)
    changed = {CHANGED: "yes"} if learn != "completion" and row.suffix else {}
    tags = {"finish": "stop", **outcome.tags, **changed}
    own = tuple(messages[len(messages) - len(outcome.turns) :])  # without turns of the prompt
    answer = Outcome(text, end=len(row.ids), tags=tags, recorded=outcome.recorded, turns=own)
    whole = Trajectory(prompt, prompt.uid, (answer,), row, len(row.ids), {"token": row.ids}, on_policy=False)
    if not replies or learn != "completion":
        return whole
    script = Transcript(prompt.tools, tuple(ids for _, ids in turns), tuple(map(tuple, replies)))
    return replace(
        whole,
        turns=(*outcome.turns, Message("assistant", (Part(text),))),
        transcript=None if outcome.asked else script,
    )


def _from_first_turn(prompt: Prompt, outcome: Outcome) -> tuple[Prompt, Outcome]:
    """Move the prompt's messages from the first assistant turn on into the turns of the answer."""
    messages = outcome.asked or prompt.messages
    first = next((i for i, one in enumerate(messages) if one.role == "assistant"), len(messages))
    begun = replace(prompt, messages=messages[:first])
    return begun, replace(outcome, asked=(), turns=(*messages[first:], *outcome.turns))


def _whole(encoder: PromptEncoder, prompt: EncodedPrompt, answer: Tensor) -> TokenRow:
    """Create a row that trains on all tokens of prompt and answer, except media placeholders."""
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
