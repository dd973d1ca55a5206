"""Turns of recorded answers: the input and the tokens of every turn of the assistant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.vision.models.listed_tools import listed_tools, with_written_calls
from mmrl.vision.models.model_families import check_length

Turns = list[tuple[Any, Tensor]]  # (encoded input, tokens (T,)) of every turn


def recorded_turns(
    encoder: Any, prompt: Prompt, outcome: Outcome
) -> Iterator[tuple[str, Tensor, Sequence[Message]]]:
    """Yield text, tokens (T,) and the replies that follow, for every turn of a recorded answer.

    Each turn of the assistant is rendered as the next turn after all messages before it. Raises ValueError
    for replies with media if the model reads none after an answer, for turns of the assistant that are
    adjacent or contain media, and where `PromptEncoder.recorded` does.
    """
    media = any(part.media for turn in outcome.turns for part in turn.parts)
    if media and not encoder.family.media_in_replies:
        raise ValueError("this model reads no media after an answer, but a recorded reply shows one")
    listed, _ = listed_tools(encoder, replace(prompt, messages=outcome.asked or prompt.messages))
    turns = [*outcome.turns, Message("assistant", (Part(outcome.text or ""),), outcome.extra)]
    described = listed.tools != prompt.tools  # Qwen's words in the system prompt
    if described:
        turns = list(map(with_written_calls, turns))
    places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    if any(part.media for place in places for part in turns[place].parts):
        raise ValueError("a turn of the assistant shows media; only texts can be learned")
    if any(after - place == 1 for place, after in pairwise(places)):
        raise ValueError("two turns of the assistant follow each other; join them to one turn")
    for place, following in pairwise([*places, len(turns)]):
        earlier = encoder.replies(turns[:place], prompt.tools) if described else turns[:place]
        before = replace(listed, messages=(*listed.messages, *earlier))
        text, ids = encoder.recorded(before, Outcome(text=turns[place].text, extra=turns[place].extra))
        yield text, ids, turns[place + 1 : following]


def encode_recorded(
    encoder: Any, prompt: Prompt, outcome: Outcome
) -> tuple[list[str], Turns, list[Sequence[Message]]]:
    """Encode a recorded answer: the texts of its turns, their tokens, and the replies between them.

    The input of a turn begins with the input and the tokens of the turn before. Raises ValueError for an
    answer that the model cannot read.
    """
    listed, tools = listed_tools(encoder, replace(prompt, messages=outcome.asked or prompt.messages))
    read, turns, replies = encoder.encode(listed), [], []
    written = list(recorded_turns(encoder, prompt, outcome))
    for _, ids, observed in written:
        turns.append((read, ids))
        if observed:
            replies.append(tuple(observed))
            read = encoder.extend(read, ids, *encoder.replies(observed, prompt.tools), tools=tools)
    check_length(read.next_position + len(turns[-1][1]) - 1, encoder.limit)
    return [text for text, *_ in written], turns, replies
