"""Pairs of one answer to an image and to a corrupted image, for mDPO's conditional preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, Literal

from mmrl.config.ranges import Ascending, PositiveShare, Range
from mmrl.config.registry import engine
from mmrl.core.protocols import Engine
from mmrl.core.rng import Stream
from mmrl.core.types import Frames, Prompt, Rollouts
from mmrl.vision.decoding.decoding import answer_half
from mmrl.vision.media.corruptions import add_frame_noise, map_frames, random_crop, without_media


@engine
@dataclass(eq=False)
class WithCorruptedImage:
    """Pair half of a prompt's rollouts with the same answers to a corrupted image, tagged `twin` (mDPO).

    arXiv 2406.11839. The copies take the place of the second half of the rollouts. One corruption is drawn
    for all answers to a prompt in a collection. A copy's text is encoded anew, and keeps what was recorded of
    its answer. Rewards that look at the prompt see the image uncorrupted.

    Args:
        engine: The wrapped engine.
        kind: "crop" shows an enlarged random crop; "noise" adds VCD's noise; "blind" removes the media.
        scale: Least and largest share of the area that a crop shows; mDPO: 0.01 to 0.2.
        noise_step: Diffusion step of the noise, 0 to 999.
    """

    engine: Engine
    _: KW_ONLY
    stream: Stream
    kind: Literal["crop", "noise", "blind"] = "crop"
    scale: Annotated[tuple[PositiveShare, PositiveShare], Ascending()] = (0.01, 0.2)
    noise_step: Annotated[int, Range(0, 999)] = 500
    notes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.policy = self.engine.policy

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Ask the wrapped engine for half of the rollouts, and append their copies with corrupted images."""
        rows, copied = answer_half(self.engine, prompts)
        twins = []
        corrupted = {prompt.uid: self._corrupted(prompt) for prompt in prompts}
        for uid, originals in copied.items():
            for row in originals:
                answer = row.outcomes[-1]
                twin = self.policy.encode(corrupted[uid], answer)
                last = twin.outcomes[-1]
                last = replace(last, tags={**last.tags, "twin": self.kind}, recorded=answer.recorded)
                twins.append(
                    replace(twin, prompt=row.prompt, group=row.group, outcomes=(last,), on_policy=False)
                )
        return (*rows, *twins)

    def _corrupted(self, prompt: Prompt) -> Prompt:
        if self.kind == "blind":
            return without_media(prompt)

        def corrupt(frames: Frames) -> Frames:
            # A new generator per call, so that a prompt that is loaded twice shows the same frames.
            generator = self.stream.generator("distortion", prompt.uid)
            if self.kind == "crop":
                return random_crop(frames, generator, self.scale)
            return add_frame_noise(frames, generator, self.noise_step)

        return map_frames(prompt, corrupt)
