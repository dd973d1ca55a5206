"""Which segment of a video every frame belongs to, whether of pixels or of latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segments_of(lengths: Sequence[int], segments: int) -> Tensor:
    """Find the segments of spans of frames that follow each other: `lengths` are numbers of pixel frames, one
    each for pixels, and those that a latent frame stands for.

    Segments are equally long. A span belongs to the one that holds its centre, the later one where it lies on
    the cut, so to that of most of its frames.
    """
    length = torch.tensor(lengths)
    end = length.cumsum(0)
    twice_centre = 2 * end - length  # whole numbers, so that cuts are exact
    return twice_centre * segments // (2 * end[-1])
