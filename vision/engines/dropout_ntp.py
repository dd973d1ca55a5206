"""Answers that lose sight of the picture halfway: worse answers without a judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mmrl.config.ranges import ShareBelowOne
from mmrl.config.registry import engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.vision.decoding.decoding import (
    CachedReader,
    ForcedPrefixReader,
    GenerationRequest,
    LogitsReader,
    TokenEngine,
)
from mmrl.vision.media.corruptions import without_media


@engine
class DropoutNtp:
    """Cut half of every prompt's answers after a `share` of their tokens, and go on without the picture
    (Dropout-NTP of MPO, arXiv 2411.10442).

    The first half of the answers to a prompt is left whole; each of the others begins as one of them. They
    record the `contrast_alpha` 1 (whole answers: 0), are no policy's own, and note the log-probability 0 of
    the tokens that were given. It wraps `vision.generate`.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: TokenEngine, *, share: ShareBelowOne = 0.5) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"`share` must lie in [0, 1), not {share}")
        self.engine, self.policy, self.share = engine, engine.policy, share

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer prompts, and continue what was answered."""
        asked = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        cut = {uid: count // 2 for uid, count in asked.items()}
        whole = self.engine.decode(
            [prompt for uid, prompt in distinct.items() for _ in range(asked[uid] - cut[uid])],
            self.engine.reader,
        )
        of = {uid: [row for row in whole if row.prompt.uid == uid] for uid in distinct}
        begun = {uid: rows[: cut[uid]] for uid, rows in of.items()}
        tails = self.engine.decode(
            [row.prompt for rows in begun.values() for row in rows],
            lambda rows: self._begin(rows, begun),
        )
        return (*(_told(row, 0.0) for row in whole), *(_told(row, 1.0) for row in tails))

    def _begin(self, rows: Sequence[GenerationRequest], begun: dict[str, list[Trajectory]]) -> LogitsReader:
        device = self.policy.core.get_input_embeddings().weight.device
        encode = self.policy.prompt_encoder.encode
        encoded = [encode(without_media(row.prompt)) for row in rows]
        branch = CachedReader(self.engine.rollout_policy, encoded, self.engine.cache)
        answers = [begun[row.prompt.uid][row.index].steps.ids for row in rows]
        return ForcedPrefixReader(branch, [ids[: int(self.share * len(ids))] for ids in answers], device)


def _told(row: Trajectory, ratio: float) -> Trajectory:
    answer = row.outcomes[-1]
    answer = replace(
        answer,
        tags={**answer.tags, "dial": str(int(ratio))},
        recorded={**answer.recorded, "contrast_alpha": ratio},
    )
    return replace(row, outcomes=(*row.outcomes[:-1], answer), on_policy=row.on_policy and ratio == 0)
