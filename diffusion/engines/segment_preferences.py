"""The segment engine: cuts sampled videos into segments that are rewarded and compared one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.types import Prompt, Rollouts, Trajectory
from mmrl.diffusion.steps import segments_of


@engine
class SegmentPreferences:
    """Cut every video into `segments` outcomes, each rewarded on its own (DenseDPO, arXiv 2506.03517).

    Each outcome ends its segment's steps, so `diffusion.matching` with as many `segments` learns from them
    one by one. A frame belongs to the segment of its centre. A recorded reward `name@2` is the reward
    `name` of segment 2, counted from 0; one without `@` is that of every segment.
    """

    notes: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, *, segments: PositiveInt) -> None:
        self.engine, self.policy, self.segments = engine, engine.policy, segments

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Run the wrapped engine, and cut its videos."""
        return tuple(self._cut(row) for row in self.engine.rollout(prompts))

    def _cut(self, row: Trajectory) -> Trajectory:
        whole = row.outcomes[-1]
        frames = 0 if whole.video is None else len(whole.video)
        if frames < self.segments or row.length % self.segments:
            raise ValueError(
                f"a row of prompt '{row.prompt.uid}' with {frames} frames and {row.length} steps cannot be "
                f"cut into {self.segments} segments; give the policy `likelihood: {{name: "
                f"diffusion.matching, segments: {self.segments}}}`, and videos of that many frames or more"
            )
        owner, steps = segments_of([1] * frames, self.segments), row.length // self.segments
        parts = []
        for number in range(self.segments):
            inside, recorded = owner == number, {}
            for name, value in whole.recorded.items():
                reward, _, segment = name.partition("@")
                if segment in ("", str(number)):
                    recorded[reward] = value
            times = None if whole.times is None else whole.times[inside]
            video, end = whole.video[inside], steps * (number + 1)
            parts.append(dataclasses.replace(whole, video=video, times=times, end=end, recorded=recorded))
        return dataclasses.replace(row, outcomes=tuple(parts))
