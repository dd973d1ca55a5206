"""Rules of the model families that write images as tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmrl.core.types import Prompt


@dataclass(frozen=True)
class ImageRules:
    """Rules of a family that writes images as tokens. `core` is the model without its head.

    Args:
        tokens: Maps a config to the ids (C,) of the image tokens, in the order of the codebook.
        layout: Maps (processor, config, rows, columns of the token grid) to the texts before the first row,
            after every row and after the last row.
        side: Maps a config to the side of a token in pixels.
        size: Maps a config to the default height and width in pixels.
        encode: Maps (core, pixel values (1, 3, H, W)) to codes (h, w).
        decode: Maps (core, codes (h, w)) to pixel values (3, H, W).
        fixed: Whether all images have the default size.
    """

    tokens: Callable[[Any], Tensor]
    layout: Callable[[Any, Any, int, int], tuple[str, str, str]]
    side: Callable[[Any], int]
    size: Callable[[Any], tuple[int, int]]
    encode: Callable[[Any, Tensor], Tensor]
    decode: Callable[[Any, Tensor], Tensor]
    fixed: bool = False

    def check_size(self, config: Any, height: int, width: int) -> tuple[int, int]:
        """Return height and width in pixels (0: default); raise ValueError for sizes that do not fit."""
        size, side = self.size(config), self.side(config)
        height, width = height or size[0], width or size[1]
        if self.fixed and (height, width) != size:
            raise ValueError(f"this model writes images of {size[0]} x {size[1]}, not of {height} x {width}")
        if height % side or width % side:
            raise ValueError(f"the sides of an image are multiples of {side} here, not {height} x {width}")
        return height, width

    def size_for(self, config: Any, height: int, width: int, prompt: Prompt) -> tuple[int, int]:
        """Return height and width in pixels: the prompt's, else `height` and `width`, else the default."""
        if asked := prompt.size:
            if asked.source or asked.num_frames > 1:
                raise ValueError(
                    "this model writes images of a given size, not that of a source, and no videos"
                )
            height, width = asked.height or height, asked.width or width
        return self.check_size(config, height, width)
