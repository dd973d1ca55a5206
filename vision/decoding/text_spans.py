"""Conversion of a policy's batch for a teacher with another prompt template or another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmrl.core.tensor import cat_padded, pad_to
from mmrl.vision.decoding.token_steps import TokenSteps
from mmrl.vision.models.processor import PromptEncoder


@dataclass(frozen=True, eq=False)
class SharedSpans:
    """The text spans that two tokenizations of N answers have in common.

    `own` (N, T) holds the span number of every policy token, and `others` (N, T') of every teacher token.
    Numbers begin at 1 in each answer; 0: no span.
    """

    own: Tensor
    others: Tensor

    def sums(self, logp: Tensor) -> Tensor:
        """Sum the teacher's `logp` (N, T') over each span; return each policy token's span sum (N, T)."""
        size = 1 + int(max(self.own.max(), self.others.max()))
        totals = logp.new_zeros(len(logp), size).scatter_add(1, self.others.to(logp.device), logp)
        totals[:, 0] = 0.0
        return totals.gather(1, self.own.to(logp.device))

    def lengths(self) -> Tensor:
        """Return, for every policy token (N, T), the number of policy tokens in its span."""
        ones, size = torch.ones_like(self.own), 1 + int(self.own.max())
        return ones.new_zeros(len(ones), size).scatter_add(1, self.own, ones).gather(1, self.own)


class Translator:
    """Converts a policy's batch for a teacher with another prompt template or another tokenizer.

    Args:
        encoder: Prompt encoder of the policy.
        other: Prompt encoder of the other model.
        align: Whether answers are tokenized again for the teacher; otherwise token ids must mean the same.
    """

    def __init__(self, encoder: PromptEncoder, other: PromptEncoder, align: bool) -> None:
        self.encoder, self.other, self.align = encoder, other, align

    def __call__(self, steps: TokenSteps) -> tuple[TokenSteps, SharedSpans | None]:
        """Convert prompts and, if `align`, answers; return new steps and shared spans (None without `align`).

        Raises ValueError for conversations with replies of tools or environments.
        """
        if steps.suffixes:
            raise ValueError(
                "a teacher with another prompt template or tokenizer reads single answers, not conversations "
                "with replies of tools or environments; name a teacher of the policy's family and vocabulary"
            )
        prompts = tuple(self._prompt(prompt) for prompt in steps.prompts)
        steps = replace(steps, prompts=prompts, tree=None)
        if not self.align:
            return steps, None
        answers = [self._answer(ids[:length]) for ids, length in zip(steps.ids, steps.length, strict=True)]
        numbers = [shared_spans(ends, others) for _, ends, others in answers]
        ids = cat_padded([ids[None] for ids, _, _ in answers])
        own = cat_padded([torch.tensor([own], dtype=torch.int64) for own, _ in numbers])
        others = cat_padded([torch.tensor([other], dtype=torch.int64) for _, other in numbers])
        length = torch.tensor([len(ids) for ids, _, _ in answers])
        spans = SharedSpans(pad_to(own, steps.ids.shape[1], 1), pad_to(others, ids.shape[1], 1))
        return replace(steps, ids=ids, length=length), spans

    def _prompt(self, encoded: Any) -> Any:
        prompt, tools = self.encoder.sources.of(encoded)
        if tools is None:
            raise ValueError(
                f"the teacher cannot write prompt '{encoded.uid}' with its own template, because the tools "
                "of a conversation from another process are not known"
            )
        return self.other.encode(prompt, tools)

    def _answer(self, ids: Tensor) -> tuple[Tensor, list[int | None], list[int | None]]:
        """Tokenize an answer (T,) for the teacher; return its ids, and the token ends of both models."""
        ended = bool(len(ids)) and int(ids[-1]) in self.encoder.end
        text = self.encoder.text(ids)
        ends = token_ends(self.encoder.tokenizer, ids[:-1].tolist() if ended else ids.tolist(), text)
        mine = self.other.plain.ids(text) if text else []
        others = token_ends(self.other.tokenizer, mine, text)
        if ended or not mine:  # the end token is a separate span; an empty answer needs a token, too
            mine, others = [*mine, self.other.end[0]], [*others, len(text) + 1]
            ends += [len(text) + 1] * ended
        return torch.tensor(mine), ends, others


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> list[int | None]:
    """Return the end of every token in a text, as the number of characters up to this end.

    None marks a token that ends inside a character, that decodes to nothing, or that comes after the first
    difference between the decoded tokens and `text`. The last token ends where the text ends.
    """
    from tokenizers.decoders import DecodeStream

    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} tells no ends of tokens; `align` needs a fast one"
        )
    stream, ends, at = DecodeStream(skip_special_tokens=True), list[int | None](), 0
    for number in ids:
        piece = stream.step(tokenizer.backend_tokenizer, int(number)) or ""
        alike = bool(piece) and text.startswith(piece, at)
        at += len(piece) if alike or not piece else len(text) + 1  # so that no later token matches
        ends.append(at if alike else None)
    if ends and max((end for end in ends if end is not None), default=0) < len(text):
        ends[-1] = len(text)
    return ends


def shared_spans(ends: Sequence[int | None], others: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Return the span number of every token of two tokenizations; a span ends where tokens of both end.

    `token_ends` returns such ends. Numbers begin at 1; tokens after the last common end get 0.
    """
    common = {end for end in ends if end is not None} & {end for end in others if end is not None}

    def numbers(ends: Sequence[int | None]) -> list[int]:
        closed = [*accumulate((end in common for end in ends), initial=0)]  # spans that end before each token
        return [number + 1 if number < len(common) else 0 for number in closed[:-1]]

    return numbers(ends), numbers(others)
