"""Engines that derive half of the answers to a prompt from the other half, for preference pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.config.ranges import ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.decoding import GenerationRequest, LogitsReader
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.engines.contrastive_decoding import record_ratio
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.prompts import without_media


def answer_half(engine: Engine, prompts: Sequence[Prompt]) -> tuple[Rollouts, dict[str, list[Trajectory]]]:
    """Sample answers for half of the entries of every prompt, rounded up.

    Returns their rows, and for every prompt id the rows from which the other half will be derived.
    """
    distinct = {prompt.uid: prompt for prompt in prompts}
    counts = Counter(prompt.uid for prompt in prompts)
    rows = engine.rollout([distinct[uid] for uid, count in counts.items() for _ in range(count - count // 2)])
    # If the number of answers is odd, no answer is derived from the last one.
    return rows, {
        uid: [row for row in rows if row.prompt.uid == uid][: count // 2] for uid, count in counts.items()
    }


@engine(sets_tags={"twin"})
@dataclass(eq=False)
class DropoutNtp:
    """Derive answers that copy the beginning of another answer and continue it without the image.

    Dropout-NTP of MPO, arXiv 2411.10442. The first half of the answers to a prompt is sampled as usual; each
    answer of the second half is derived from one of them. Derived answers record `contrast_alpha` 1 (others
    0), are off-policy, and have log-probability 0 for the copied tokens. The engine wraps `vision.generate`.

    Args:
        engine: The wrapped engine.
        share: Fraction of an answer's tokens that is copied, in [0, 1).
    """

    engine: Generate
    _: KW_ONLY
    share: ShareBelowOne = 0.5
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample half of the answers to every prompt, and derive the other half."""
        whole, cut = answer_half(self.engine, prompts)

        def begin(rows: Sequence[GenerationRequest]) -> LogitsReader:
            encode = self.policy.prompt_encoder.encode
            device = self.policy.core.get_input_embeddings().weight.device
            reader = self.engine.reader([encode(without_media(row.prompt)) for row in rows])
            # The i-th derived answer copies the beginning of the i-th sampled answer.
            answers = [cut[row.prompt.uid][row.index].steps.ids.to(device) for row in rows]
            # Rounded down, so that at least the last token is sampled.
            return ForcedPrefixReader(reader, [ids[: int(self.share * len(ids))] for ids in answers])

        continued = self.engine.decode([row.prompt for rows in cut.values() for row in rows], begin)
        return (
            *(record_ratio(row, 0.0, "0") for row in whole),
            *(record_ratio(row, 1.0, "1") for row in continued),
        )


class ForcedPrefixReader:
    """Reader that makes rows start with given tokens: it gives all other tokens probability 0."""

    def __init__(self, reader: LogitsReader, forced: Sequence[Tensor]) -> None:
        self.reader = reader
        self.forced = pad_sequence(list(forced), batch_first=True, padding_value=-1)  # (n, T)
        self.length = 0
        self.logits = torch.empty(0)  # logits of the latest step, before masking

    def read(self, token: Tensor | None) -> Tensor:
        """Read a token of every row; return the next logits, masked except for the next forced token."""
        self.logits = logits = self.reader.read(token)
        if self.length < self.forced.shape[1]:
            wanted = self.forced[:, self.length, None]
            # A logit of 0 among FORBIDDEN logits gives a log-probability of exactly 0.
            only = torch.full_like(logits, FORBIDDEN).scatter(1, wanted.clamp(min=0), 0.0)
            logits = torch.where(wanted >= 0, only, logits)
        self.length += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows with these indices (k,)."""
        self.reader.keep(rows)
        self.forced = self.forced[rows]
