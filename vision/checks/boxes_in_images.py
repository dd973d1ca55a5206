"""Startup check that target boxes are in pixels of their image."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import check
from mmrl.diagnostics.context import Examined, Finding
from mmrl.vision.benchmarks.boxes import Boxes


@check(on="start")
def boxes_in_images(examined: Examined, *, slack: NonNegativeFloat = 0.02) -> Iterator[Finding]:
    """Check that target boxes lie inside their images. Boxes annotated at another size often lie outside.

    Args:
        slack: Allowed overhang, because annotations are rounded, as a fraction of the image's side.
    """
    boxed = [p for p in examined.prompts if isinstance(p.target, Boxes) and len(p.media) == 1]
    outside: dict[str, str] = {}
    for prompt in boxed:
        height, width = prompt.media[0].load().pixels.shape[-2:]
        for left, top, right, bottom in prompt.target.boxes:
            low, across, down = 1 + slack * max(width, height), width * (1 + slack), height * (1 + slack)
            if min(left, top) < -low or right > across + 1 or bottom > down + 1:
                box = f"[{left:g}, {top:g}, {right:g}, {bottom:g}]"
                outside[prompt.uid] = (
                    f"the box {box} of prompt '{prompt.uid}' does not lie in its image of {width} x {height}"
                )
    if outside:
        yield Finding(
            f"{next(iter(outside.values()))} ({len(outside)} of {len(boxed)} prompts)",
            "give the boxes in pixels of the image as it is stored, or convert them; see `form` too",
            grave=2 * len(outside) > len(boxed),
        )
