"""Videos that are compared segment by segment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.diffusion.segments import segments_of


@engine
class SegmentPreferences:
    """Cut every row's video into `segments` outcomes, each the end of its own steps (DenseDPO, arXiv
    2506.03517).

    So rewards look at one segment at a time, and `diffusion.matching` with as many `segments` learns from
    them one by one. A frame belongs to the segment that holds its centre. A recorded reward `name@2` is the
    reward `name` of segment 2, counted from 0; one without `@` is that of every segment.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, *, segments: PositiveInt) -> None:
        if segments < 1:
            raise ValueError(f"`segments` must be at least 1, not {segments}")
        self.engine, self.policy, self.segments = engine, engine.policy, segments

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine, and cut what it made."""
        return tuple(self._cut(row) for row in self.engine.rollout(prompts))

    def _cut(self, row: Trajectory) -> Trajectory:
        whole = row.outcomes[-1]
        if whole.video is None or len(whole.video) < self.segments or row.length % self.segments:
            frames = 0 if whole.video is None else len(whole.video)
            raise ValueError(
                f"a row of prompt '{row.prompt.uid}' with {frames} frames and {row.length} steps cannot be "
                f"cut into {self.segments} segments; give the policy `likelihood: {{name: "
                f"diffusion.matching, segments: {self.segments}}}`, and videos of that many frames or more"
            )
        frames = len(whole.video)
        owner = segments_of([1] * frames, self.segments)
        steps = row.length // self.segments
        parts = tuple(self._part(whole, owner, number, steps) for number in range(self.segments))
        return dataclasses.replace(row, outcomes=parts)

    def _part(self, whole: Outcome, owner: torch.Tensor, number: int, steps: int) -> Outcome:
        inside = owner == number
        recorded = {}
        for name, value in whole.recorded.items():
            reward, _, segment = name.partition("@")
            if segment in ("", str(number)):
                recorded[reward] = value
        return dataclasses.replace(
            whole,
            video=whole.video[inside],
            times=None if whole.times is None else whole.times[inside],
            end=steps * (number + 1),
            recorded=recorded,
        )
