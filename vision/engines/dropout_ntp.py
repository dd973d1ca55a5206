"""Dropout-NTP: answers that are continued without the image are the worse side of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.ranges import ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader, answer_half
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.engines.contrastive_decoding import record_ratio
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.corruptions import without_media


@engine
@dataclass(eq=False)
class DropoutNtp:
    """Cut half of a prompt's answers after a share of their tokens, and continue them without the image.

    Dropout-NTP of MPO, arXiv 2411.10442. The first half of the answers to a prompt stays whole; each of the
    others starts as one of them. Continued answers record `contrast_alpha` 1 (whole ones 0), are off-policy,
    and note log-probability 0 for the tokens that they start with. The engine wraps `vision.generate`.

    Args:
        engine: The wrapped engine.
        share: The share of an answer's tokens that is kept, in [0, 1).
    """

    engine: Generate
    _: KW_ONLY
    share: ShareBelowOne = 0.5
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer half of the entries of every prompt, and continue those answers for the other half."""
        whole, cut = answer_half(self.engine, prompts)

        def begin(rows: Sequence[GenerationRequest]) -> LogitsReader:
            encode = self.policy.prompt_encoder.encode
            device = self.policy.core.get_input_embeddings().weight.device
            reader = self.engine.reader([encode(without_media(row.prompt)) for row in rows])
            answers = [cut[row.prompt.uid][row.index].steps.ids.to(device) for row in rows]
            return ForcedPrefixReader(reader, [ids[: int(self.share * len(ids))] for ids in answers])

        continued = self.engine.decode([row.prompt for rows in cut.values() for row in rows], begin)
        return (
            *(record_ratio(row, 0.0, "0") for row in whole),
            *(record_ratio(row, 1.0, "1") for row in continued),
        )


class ForcedPrefixReader:
    """Forces rows to start with given tokens: until those end, every other token has probability 0."""

    def __init__(self, reader: LogitsReader, forced: Sequence[Tensor]) -> None:
        self.reader = reader
        self.forced = pad_sequence(list(forced), batch_first=True, padding_value=-1)  # (n, T)
        self.length = 0

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token, and mask all logits but that of the next forced token of a row."""
        logits = self.reader.read(token)
        if self.length < self.forced.shape[1]:
            wanted = self.forced[:, self.length, None]
            # One logit of 0 among FORBIDDEN ones is a log-probability of exactly 0.
            only = torch.full_like(logits, FORBIDDEN).scatter(1, wanted.clamp(min=0), 0.0)
            logits = torch.where(wanted >= 0, only, logits)
        self.length += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Continue with some rows."""
        self.reader.keep(rows)
        self.forced = self.forced[rows]
