"""Startup check that images, videos and sounds influence the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import check
from mmrl.core.types import Prompt, Sound
from mmrl.diagnostics.context import Examined, Finding
from mmrl.vision.media.prompts import map_frames, map_media


@check(on="start")
def media_conditioning(examined: Examined, *, rows: PositiveInt = 4) -> Iterator[Finding]:
    """Check that the log-probabilities of answers change when images, videos or sounds change.

    The pixels of images and videos are inverted, and sounds are reversed.

    Args:
        rows: Number of rollouts with media to compare.
    """
    shown = [row for row in examined.rollouts if row.prompt.media][:rows]
    if not shown:
        return
    encode, logps = examined.policy.encode, examined.log_probabilities
    seen = logps(tuple(encode(row.prompt, row.outcomes[-1]) for row in shown))
    inverted = logps(tuple(encode(negative(row.prompt), row.outcomes[-1]) for row in shown))
    # Compare exactly: if the model reads the pixels at all, at least the rounding changes.
    blind = [row for row, a, b in zip(shown, seen, inverted, strict=True) if bool((a == b).all())]
    if blind:
        uids = list(dict.fromkeys(row.prompt.uid for row in blind))
        others = f" and {len(uids) - 1} more" if len(uids) > 1 else ""
        yield Finding(
            f"the media of prompt '{uids[0]}'{others} do not reach the model: its answers are exactly as "
            "likely when every pixel or sample changes",
            "see that the chat template has a place for them, that the processor is the model's own, and "
            "that pixel values are passed to the forward call",
        )


def negative(prompt: Prompt) -> Prompt:
    """Invert the pixels of the images and videos in a prompt, and reverse its sounds in time."""
    inverted = map_frames(prompt, lambda frames: replace(frames, pixels=255 - frames.pixels))
    # Reverse time, not sign: models read the power of a sound.
    return map_media(inverted, Sound, lambda sound: replace(sound, samples=sound.samples.flip(0)))
