"""Engine that records the scores of a reward model for the answers of another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts


@engine
class WithScores:
    """Score the wrapped engine's answers with the policy, which must be a `vision.reward_model`.

    The scores are recorded with the answers.

    The reward `precomputed` reads a score by its key: `score`, or `score/NAME` for a model's label NAME.
    To evaluate a reward model, set `evaluation.engine: [offline, vision.with_scores]`, with the metric
    `pairwise_accuracy`.

    Args:
        engine: The wrapped engine.
        batch_size: Answers per forward pass.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, *, batch_size: PositiveInt = 8) -> None:
        self.engine, self.batch_size = engine, batch_size
        self.policy: Any = engine.policy
        if not hasattr(self.policy, "scores"):
            raise ConfigError("`vision.with_scores` records scores of the policy `vision.reward_model`")

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Return the rollouts of the wrapped engine, whose outcomes also have the recorded scores."""
        rows = self.engine.rollout(prompts)
        with torch.no_grad():
            scores = self.policy.scores(rows, self.batch_size)
        scored = []
        for row, values in zip(rows, scores.tolist(), strict=True):
            *before, last = row.outcomes
            recorded = {**last.recorded, **dict(zip(self.policy.names, values, strict=True))}
            scored.append(replace(row, outcomes=(*before, replace(last, recorded=recorded))))
        return tuple(scored)
