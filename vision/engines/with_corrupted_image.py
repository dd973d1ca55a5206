"""Answers set behind a spoilt picture, as the worse side of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from mmrl.config.ranges import Ascending, PositiveShare, Range
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Prompt, Rollouts, Trajectory
from mmrl.vision.media.corruptions import add_frame_noise, map_frames, random_crop, without_media


@engine
class WithCorruptedImage:
    """Replace the second half of every prompt's rollouts by the first half behind a spoilt picture, tagged
    `twin` (mDPO, arXiv 2406.11839).

    `crop` shows a part of the picture, of an area drawn from `scale`; `noise` VCD's noise; `blind` nothing.
    A draw holds for all answers to a prompt in one collection. A twin's text is encoded anew; what was
    recorded of its answer holds for the twin. Rewards that look at the prompt see the picture as it is.
    """

    notes: frozenset[str] = frozenset()

    def __init__(
        self,
        engine: Engine,
        *,
        stream: Stream,
        kind: Literal["crop", "noise", "blind"] = "crop",
        scale: Annotated[tuple[PositiveShare, PositiveShare], Ascending()] = (0.01, 0.2),
        noise_step: Annotated[int, Range(0, 999)] = 500,
    ) -> None:
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f"`scale` must be the least and the largest share of the area, not {list(scale)}"
            )
        self.engine, self.policy, self.stream = engine, engine.policy, stream
        self.kind, self.scale, self.noise_step = kind, scale, noise_step

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine for half of the rollouts, and put their twins behind them."""
        asked = Counter(prompt.uid for prompt in prompts)
        distinct = {prompt.uid: prompt for prompt in prompts}
        rows = self.engine.rollout(
            [prompt for uid, prompt in distinct.items() for _ in range(asked[uid] - asked[uid] // 2)]
        )
        twins = []
        for uid, prompt in distinct.items():
            shown = self._spoilt(prompt)
            mine = [row for row in rows if row.prompt.uid == uid][: asked[uid] // 2]
            twins += [self._twin(row, shown) for row in mine]
        return (*rows, *twins)

    def _spoilt(self, prompt: Prompt) -> Prompt:
        if self.kind == "blind":
            return without_media(prompt)

        def spoil(frames: Frames) -> Frames:
            # The generator is made anew, so that a prompt that is read twice shows the same.
            generator = self.stream.generator("distortion", prompt.uid)
            if self.kind == "crop":
                return random_crop(frames, generator, self.scale)
            return add_frame_noise(frames, generator, self.noise_step)

        return map_frames(prompt, spoil)

    def _twin(self, row: Trajectory, shown: Prompt) -> Trajectory:
        answer = row.outcomes[-1]
        twin = self.policy.encode(shown, answer)
        last = twin.outcomes[-1]
        told = replace(last, tags={**last.tags, "twin": self.kind}, recorded=answer.recorded)
        return replace(twin, prompt=row.prompt, group=row.group, outcomes=(told,), on_policy=False)
