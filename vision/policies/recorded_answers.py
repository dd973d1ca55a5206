"""A policy without a model, to evaluate recorded answers."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from torch import nn

from mmrl.config.registry import policy
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory


@policy
class RecordedAnswers:
    """Policy without a model, to evaluate recorded answers with the engine `offline`; its steps are words."""

    outputs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.module = nn.Module()

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Convert a recorded answer to a row."""
        return Trajectory(prompt, prompt.uid, (outcome,), None, len((outcome.text or "").split()))

    def collate(self, rollouts: Rollouts) -> Batch:
        """Raise ValueError, because there is nothing to train."""
        raise ValueError(
            "`vision.recorded_answers` measures answers and learns nothing; name a model to train"
        )

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        """Raise ValueError, because without a model there are no probabilities."""
        raise ValueError("`vision.recorded_answers` gives no step a probability; name a model")

    def save(self, folder: Path) -> None:
        """Write nothing, because there are no weights."""

    def load(self, folder: Path) -> None:
        """Load nothing, because there are no weights."""
