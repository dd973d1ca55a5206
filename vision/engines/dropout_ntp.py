"""Dropout-NTP: answers that are continued without the image are the worse side of preference pairs."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.ranges import ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.decoding import (
    CachedReader,
    ForcedPrefixReader,
    GenerationRequest,
    LogitsReader,
    split_in_halves,
)
from mmrl.vision.engines.contrastive_decoding import record_ratio
from mmrl.vision.engines.generate import Generate
from mmrl.vision.media.corruptions import without_media


@engine
class DropoutNtp:
    """Cut half of a prompt's answers after a share of their tokens, and continue them without the image.

    Dropout-NTP of MPO, arXiv 2411.10442. The first half of the answers to a prompt stays whole; each of the
    others starts as one of them. Continued answers record `contrast_alpha` 1 (whole ones 0), are off-policy,
    and note log-probability 0 for the tokens that they start with. The engine wraps `vision.generate`.

    Args:
        engine: The wrapped engine.
        share: The share of an answer's tokens that is kept, in [0, 1).
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Generate, *, share: ShareBelowOne = 0.5) -> None:
        self.engine, self.policy, self.share = engine, engine.policy, share

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer half of the entries of every prompt, and continue those answers for the other half."""
        first, second = split_in_halves(prompts)
        whole = self.engine.decode(first, self.engine.reader)
        cut = {uid: [row for row in whole if row.prompt.uid == uid][:size] for uid, size in second.items()}
        continued = self.engine.decode(
            [row.prompt for rows in cut.values() for row in rows],
            lambda requests: self._begin(requests, cut),
        )
        return (
            *(record_ratio(row, 0.0, "0") for row in whole),
            *(record_ratio(row, 1.0, "1") for row in continued),
        )

    def _begin(self, rows: Sequence[GenerationRequest], cut: dict[str, list[Trajectory]]) -> LogitsReader:
        device = self.policy.core.get_input_embeddings().weight.device
        encoded = [self.policy.prompt_encoder.encode(without_media(row.prompt)) for row in rows]
        reader = CachedReader(self.engine.rollout_policy, encoded, self.engine.cache)
        answers = [cut[row.prompt.uid][row.index].steps.ids for row in rows]
        return ForcedPrefixReader(reader, [ids[: int(self.share * len(ids))] for ids in answers], device)
