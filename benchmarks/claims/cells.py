"""Images of coloured cells with noise, and PNG files of them, for the claims of VLM methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from examples.image_rl.coloured_shape import COLOURS as SHADES

SIDE = 16  # pixels of an image
COLOURS = tuple(sorted(SHADES))


def save_cells(path: Path, colours: Sequence[str], noise: float, generator: torch.Generator) -> None:
    """Write an image (SIDE x SIDE) whose columns are cells of the colours, on a light ground.

    A cell is 6 pixels high and fills its column but for a margin of one pixel; it stands at any height.

    Args:
        path: The PNG file.
        colours: Names of the colours, from left to right.
        noise: Standard deviation of the noise of every pixel and channel, of 255.
        generator: Draws heights and noise.
    """
    from PIL import Image

    image, wide = torch.full((SIDE, SIDE, 3), 235.0), SIDE // len(colours)
    for number, colour in enumerate(colours):
        top = int(torch.randint(1, SIDE - 6, (), generator=generator))
        image[top : top + 6, number * wide + 1 : (number + 1) * wide - 1] = torch.tensor(
            SHADES[colour]
        ).float()
    image += noise * torch.randn(image.shape, generator=generator)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image.clamp(0, 255).byte().flatten().tolist()
    Image.frombytes("RGB", (SIDE, SIDE), bytes(pixels)).save(path)


def drawn_colours(count: int, generator: torch.Generator) -> list[str]:
    """Draw different colours."""
    return [COLOURS[at] for at in torch.randperm(len(COLOURS), generator=generator)[:count].tolist()]
