"""Where a model would stand: answers that are there already."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from torch import nn

from mmrl.config.registry import policy
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory


@policy
class RecordedAnswers:
    """No model at all: with the engine `stored`, evaluations measure ready-made answers. A step is a word, so
    lengths are in words."""

    says: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.module = nn.Module()

    def encode(self, prompt: Prompt, outcome: Outcome) -> Trajectory:
        """Take an answer as a row."""
        return Trajectory(prompt, prompt.uid, (outcome,), None, len((outcome.text or "").split()))

    def collate(self, rollouts: Rollouts) -> Batch:
        """Refuse: there is nothing to learn."""
        raise ValueError(
            "`vision.recorded_answers` measures ready-made answers and learns nothing; name a model to train"
        )

    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        """Refuse: nothing gives the steps a probability."""
        raise ValueError("`vision.recorded_answers` gives no step a probability; name a model")

    def save(self, folder: Path) -> None:
        """Write nothing."""

    def load(self, folder: Path) -> None:
        """Take up nothing."""
