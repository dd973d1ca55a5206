"""Requirements of rewards on prompts and outcomes, which are checked before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.core.types import Media, Prompt

VISUAL = frozenset({"image", "video"})
FrameSize = tuple[int, int, int]  # frames, height and width


@dataclass(frozen=True)
class RewardInputs:
    """Requirements of a reward on prompts and outcomes.

    Args:
        outcomes: Kinds of outcomes that the reward scores: "text", "image", "video"; empty: all.
        source: Whether the prompt must have a medium, such as the image of an edit.
        texts: Columns that must hold a text.
        optional: Media columns; a prompt that lacks one of these columns gets no reward, without an error.
        min_frames: Smallest allowed number of frames of a video.
        min_side: Smallest allowed number of pixels on the shorter side.
    """

    outcomes: frozenset[str] = frozenset()
    source: bool = False
    texts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    min_frames: int = 1
    min_side: int = 1

    @property
    def any_size(self) -> bool:
        """Whether images and videos of every size can be scored."""
        return self.min_frames == self.min_side == 1 and (not self.outcomes or self.outcomes >= VISUAL)

    def applies(self, prompt: Prompt) -> bool:
        """Whether the prompt has all optional media."""
        return all(isinstance(prompt.columns.get(name), Media) for name in self.optional)

    def missing(self, prompt: Prompt) -> str:
        """Describe a required input that a prompt lacks; empty if the prompt has all required inputs."""
        if self.source and not prompt.media:
            return "a source image"
        values = {name: prompt.columns.get(name) for name in self.texts}
        empty = [name for name, text in values.items() if not isinstance(text, str) or not text.strip()]
        return f"a text in the column '{empty[0]}'" if empty else ""

    def unfit(self, kind: str, size: FrameSize) -> str:
        """Explain why an outcome of this kind and size cannot be scored; "" if it can be."""
        frames, height, width = size
        scored = " or ".join(f"{one}s" for one in sorted(self.outcomes))
        if self.outcomes and kind not in self.outcomes:
            return f"scores {scored}, but the outcomes are {kind}s"
        if kind == "video" and frames < self.min_frames:
            return f"scores videos of at least {self.min_frames} frames, not {frames}"
        if kind in VISUAL and min(height, width) < self.min_side:
            return f"reads at least {self.min_side} pixels a side, not {height} x {width}"
        return ""
