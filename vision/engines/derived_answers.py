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
from mmrl.vision.decoding.branching import Branch
from mmrl.vision.decoding.continuing import ContinuingEngine
from mmrl.vision.decoding.decoding import LogitsReader
from mmrl.vision.decoding.token_steps import FORBIDDEN
from mmrl.vision.engines.contrastive_decoding import record_ratio
from mmrl.vision.media.prompts import without_media


def answer_half(engine: Engine, prompts: Sequence[Prompt]) -> tuple[Rollouts, dict[str, list[Trajectory]]]:
    """Sample half of the answers to every prompt, rounded up; `prompts` has one entry per answer.

    Returns the sampled rows, and a map from the uid of every prompt to the rows to derive the others from.
    """
    distinct = {prompt.uid: prompt for prompt in prompts}
    counts = Counter(prompt.uid for prompt in prompts)
    rows = engine.rollout([distinct[uid] for uid, count in counts.items() for _ in range(count - count // 2)])
    # If the number of answers is odd, the last sampled one remains without a derived answer.
    return rows, {
        uid: [row for row in rows if row.prompt.uid == uid][: count // 2] for uid, count in counts.items()
    }


@engine(sets_tags={"twin"})
@dataclass(eq=False)
class DropoutNtp:
    """Derive answers that copy the beginning of another answer and continue it without the image.

    Dropout-NTP of MPO, arXiv 2411.10442. The first half of the answers to a prompt is sampled as usual; each
    answer of the second half is derived from one of them. Derived answers record `contrast_alpha` 1 (others
    0), are off-policy, and have log-probability 0 for the copied tokens. The engine wraps `vision.generate`
    or `vision.vllm`.

    Args:
        engine: The wrapped engine.
        share: Fraction of an answer's tokens that is copied, in [0, 1).
    """

    engine: ContinuingEngine
    _: KW_ONLY
    share: ShareBelowOne = 0.5
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Sample half of the answers to every prompt, and derive the other half."""
        whole, cut = answer_half(self.engine, prompts)
        encode, branches, sources = self.policy.prompt_encoder.encode, [], []
        for uid, rows in cut.items():
            for index, row in enumerate(rows):
                # Rounded down, so that at least the last token is sampled.
                copied = row.steps.ids[: int(self.share * len(row.steps.ids))]
                generator = self.engine.stream.generator(uid, index)
                uniform = torch.rand(self.engine.max_completion_length, generator=generator)[len(copied) :]
                branches.append(Branch(encode(without_media(row.prompt)), uniform, copied, scored=False))
                sources.append(row)
        derived = []
        for row, branch, grown in zip(sources, branches, self.engine.grow(branches), strict=True):
            assert grown is not None  # only a branch with a parent can be None
            notes = grown.notes
            for name in notes.keys() - {"token"}:  # a copied token has probability 1
                notes[name] = torch.cat([torch.zeros(branch.given), notes[name][branch.given :]])
            derived.append(self.engine.row(row.prompt, encode(row.prompt), notes, grown.stopped))
        return (
            *(record_ratio(row, 0.0, "0") for row in whole),
            *(record_ratio(row, 1.0, "1") for row in derived),
        )


class ForcedPrefixReader:
    """Reader that makes rows start with forced tokens, by giving all other tokens probability 0."""

    def __init__(self, reader: LogitsReader, forced: Sequence[Tensor]) -> None:
        self.reader = reader
        self.forced = pad_sequence(list(forced), batch_first=True, padding_value=-1)  # (n, T)
        self.length = 0
        self.logits = torch.empty(0)  # logits of the latest step, before masking

    def read(self, token: Tensor | None) -> Tensor:
        """Append one token to every row; return logits that allow only its next forced token, if any."""
        self.logits = logits = self.reader.read(token)
        if self.length < self.forced.shape[1]:
            wanted = self.forced[:, self.length, None]
            # A logit of 0 among FORBIDDEN logits gives a log-probability of exactly 0.
            only = torch.full_like(logits, FORBIDDEN).scatter(1, wanted.clamp(min=0), 0.0)
            logits = torch.where(wanted >= 0, only, logits)
        self.length += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Keep only the answers (rows) with these indices (k,) in the batch."""
        self.reader.keep(rows)
        self.forced = self.forced[rows]
