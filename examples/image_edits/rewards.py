"""Rewards of the editing demo: pixels against the recorded edit, and a judge that reads shapes by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from examples.image_edits.shape_edits import BLOCK, CELL, GROUND, SHAPES, USED
from examples.image_rl.coloured_shape import COLOURS
from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.rewards.edits import source_of
from mmrl.rewards.adapters import per_outcome

Seen = dict[tuple[int, int], tuple[str | None, str | None]]  # colour and shape by cell


@reward
@per_outcome
def edit_progress(prompt: Prompt, outcome: Outcome) -> float:
    """How much of the recorded edit is done inside the mask: 1 all of it, 0 nothing; at least -1.

    One minus the mean absolute difference to the recorded edit, divided by that of the source.
    """
    mask = prompt.columns["mask"].load().pixels[0, 0] >= 128  # (height, width)
    wanted, source = prompt.answers[0].image, source_of(prompt, "edit_progress")
    far, left = ((image.float() - wanted).abs()[:, mask].mean() for image in (source, outcome.image))
    return max(-1.0, 1 - float(left / far))


@reward
@per_outcome
def edited_shapes(
    prompt: Prompt, outcome: Outcome, *, slight: PositiveFloat = 60.0, colour_distance: PositiveFloat = 100.0
) -> float:
    """1 for an image with the shapes of the row's `after` in their cells and nothing else, else 0.

    A shape outside the mask that moved, vanished or changed its colour makes the image wrong too.

    Args:
        slight: Distance of colours, of 441, up to which a block counts as ground.
        colour_distance: Largest distance of a shape's mean colour from the colour that it has by name.
    """
    seen = read_scene(outcome.image, slight, colour_distance)
    return float(seen == expected(prompt.columns["after"]))


def expected(after: Mapping[str, Sequence[Any]]) -> Seen:
    """Read colour and shape by cell from a row's `after`: colour, row and column by shape."""
    return {(row, column): (colour, shape) for shape, (colour, row, column) in after.items()}


def read_scene(image: Tensor, slight: float = 60.0, colour_distance: float = 100.0) -> Seen:
    """Read colour and shape of every cell that is not empty.

    A shape is recognised if exactly its blocks differ from the ground; None for what is not recognised.
    """
    blocks = rearrange(image.double(), "c (h p) (w q) -> h w (p q) c", p=BLOCK, q=BLOCK).mean(2)
    away = (blocks - torch.tensor(GROUND)).norm(dim=-1) > slight
    seen: Seen = {}
    for row, column in (away.unfold(0, CELL, CELL).unfold(1, CELL, CELL).any(-1).any(-1)).nonzero().tolist():
        place = (slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL))
        colour = blocks[place][away[place]].mean(0)
        pattern = tuple("".join("X" if there else "." for there in line) for line in away[place].tolist())
        far = {name: float((colour - torch.tensor(COLOURS[name])).norm()) for name in USED}
        nearest = min(far, key=far.__getitem__)
        shape = next((name for name, blocks_of in SHAPES.items() if blocks_of == pattern), None)
        seen[row, column] = (nearest if far[nearest] <= colour_distance else None, shape)
    return seen
