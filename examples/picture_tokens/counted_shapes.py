"""Captions such as "three red circles", images of them, and two rewards that read images by rule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from examples.image_edits.shape_edits import pick
from examples.image_rl.coloured_shape import COLOURS, SHAPES
from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import builder, data, reward
from mmrl.core.rng import Stream
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import write_rows
from mmrl.rewards.adapters import per_outcome

CELL, CELLS, SIZE = 8, 2, 6  # side of a cell and of a shape in pixels; cells across an image
SIDE, GROUND = CELL * CELLS, 255
NUMBERS = ("one", "two", "three", "four")
USED = ("blue", "green", "red", "yellow")
PLANNED = "plan, then draw {}"  # asks for a text about places before the image
CORNERS = ("top left", "top right", "bottom left", "bottom right")  # names of the cells
PATTERN = re.compile(rf"({'|'.join(NUMBERS)}) ({'|'.join(USED)}) ({'|'.join(SHAPES)})s?\b")


class Asked(NamedTuple):
    """A image that a caption asks for."""

    count: int
    colour: str
    shape: str

    @property
    def caption(self) -> str:
        """The image in words."""
        return f"{NUMBERS[self.count - 1]} {self.colour} {self.shape}{'s' * (self.count > 1)}"

    @property
    def held_out(self) -> bool:
        """Whether no training caption asks for this: one count of every colour and shape."""
        return (USED.index(self.colour) + SHAPES.index(self.shape)) % len(NUMBERS) + 1 == self.count


ASKED = tuple(
    Asked(count, colour, shape) for count, colour, shape in product(range(1, len(NUMBERS) + 1), USED, SHAPES)
)


def asked_of(text: str) -> Asked | None:
    """Read what a text asks for; None if it asks for nothing."""
    found = PATTERN.search(text.lower())
    return found and Asked(NUMBERS.index(found[1]) + 1, found[2], found[3])


def cells_of(asked: Asked, generator: Generator) -> list[int]:
    """Draw the cells of the shapes, in order of rows."""
    return sorted(torch.randperm(CELLS * CELLS, generator=generator)[: asked.count].tolist())


def plan(asked: Asked, cells: list[int]) -> str:
    """Describe where the shapes are: the thought before an image."""
    return f"{asked.colour} {asked.shape} {', '.join(CORNERS[cell] for cell in cells)}"


def draw_image(asked: Asked, cells: list[int]) -> Tensor:
    """Draw shapes in cells: an image (3, side, side) uint8."""
    image = torch.full((3, SIDE, SIDE), float(GROUND))
    cover, ink = _cover(asked.shape), torch.tensor(COLOURS[asked.colour])[:, None, None]
    for row, column in (divmod(cell, CELLS) for cell in cells):
        place = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        place.copy_(place * (1 - cover) + ink * cover)
    return image.round().byte()


@cache
def _cover(shape: str) -> Tensor:
    """Draw the share of every pixel of a cell that a shape covers (cell, cell)."""
    from PIL import Image, ImageDraw

    fine = 8
    large = Image.new("L", (CELL * fine, CELL * fine))
    low, high = (CELL - SIZE) * fine // 2, (CELL + SIZE) * fine // 2 - 1
    draw, box = ImageDraw.Draw(large), (low, low, high, high)
    if shape == "triangle":
        draw.polygon([(low, high), (high, high), ((low + high) // 2, low)], fill=255)
    else:
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=255)
    small = large.resize((CELL, CELL), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(CELL, CELL) / 255


@builder
@dataclass(kw_only=True)
class CountedShapes:
    """Write the captions: `train.jsonl`, and `test.jsonl`, which also has those that are never trained on.

    Of every colour and shape one count is held out: 12 captions of 48.
    """

    stream: Stream

    def build(self, output: Path) -> dict[str, Any]:
        """Write rows for `diffusion.prompts`; return the number of rows."""
        captions = {"train": [one for one in ASKED if not one.held_out], "test": ASKED}
        return {
            name: write_rows(
                output / f"{name}.jsonl", [{"id": one.caption, "prompt": one.caption} for one in some]
            )
            for name, some in captions.items()
        }


@data
def painted(
    *, stream: Stream, count: PositiveInt = 600, wrong: Probability = 0.4, planned: Probability = 0.5
) -> list[Prompt]:
    """Draw training captions with images as recorded answers, a share of which show something else.

    Some prompts ask for a plan first; their answers have a text about places before the image. Held-out
    captions do not occur.

    Args:
        count: Rows.
        wrong: Share of images with another count, colour or shape than their caption.
        planned: Share of rows with a plan.
    """
    known, rows = [one for one in ASKED if not one.held_out], []
    for number in range(count):
        generator = stream.fixed("painted", number)
        shown = asked = known[pick(len(known), generator)]
        first, second = torch.rand(2, generator=generator).tolist()
        if first < wrong:
            near = [one for one in ASKED if sum(a != b for a, b in zip(one, asked, strict=True)) == 1]
            shown = near[pick(len(near), generator)]
        cells, with_plan = cells_of(shown, generator), second < planned
        text = PLANNED.format(asked.caption) if with_plan else asked.caption
        answer = Outcome(plan(shown, cells) if with_plan else None, draw_image(shown, cells))
        rows.append(Prompt(f"{number}", (Message("user", (Part(text),)),), answers=(answer,)))
    return rows


# ---- rewards


@reward
@per_outcome
def counted_shapes(
    prompt: Prompt,
    outcome: Outcome,
    *,
    part: Literal["all", "mean", "count", "colour", "shape"] = "mean",
) -> float | None:
    """Read every cell of an image, and compare count, colours and shapes with the caption.

    None for a prompt that asks for no shapes.

    Args:
        part: `count`: 1 for as many cells with something in them as asked, else 0. `colour`, `shape`: share
            of these cells with the asked one. `mean`: their mean. `all`: 1 if all three are 1, else 0.
    """
    asked = asked_of(prompt.text)
    if asked is None:
        return None
    seen = [] if outcome.image is None else read_cells(outcome.image)
    scores = {
        "count": float(len(seen) == asked.count),
        "colour": sum(colour == asked.colour for colour, _ in seen) / max(1, len(seen)),
        "shape": sum(shape == asked.shape for _, shape in seen) / max(1, len(seen)),
    }
    scores |= {"mean": sum(scores.values()) / 3, "all": float(min(scores.values()) == 1)}
    return scores[part]


def read_cells(image: Tensor, clear: float = 36.0) -> list[tuple[str | None, str | None]]:
    """Read colour and shape of every cell of an image that is not empty; None for what is not clear.

    A clear cell differs from the nearest of all drawings by at most `clear` of 255 (root mean square).
    """
    tiles = image.float().unfold(1, CELL, CELL).unfold(2, CELL, CELL).flatten(1, 2)  # (3, cells, CELL, CELL)
    full = ((tiles - GROUND).norm(dim=0) > 60).float().mean((1, 2)) >= 1 / 32  # (cells,)
    drawn = _drawings()
    far = torch.cdist(tiles.transpose(0, 1).flatten(1)[full], torch.stack([*drawn.values()]))
    least, nearest = far.div(far.new_tensor(3 * CELL * CELL).sqrt()).min(1)
    names = [*drawn]
    return [
        names[which] if distance <= clear else (None, None)
        for distance, which in zip(least.tolist(), nearest.tolist(), strict=True)
    ]


@cache
def _drawings() -> dict[tuple[str, str], Tensor]:
    """Draw every colour and shape in one cell (3 * CELL * CELL,)."""
    return {
        (colour, shape): draw_image(Asked(1, colour, shape), [0])[:, :CELL, :CELL].float().flatten()
        for colour, shape in product(USED, SHAPES)
    }


@reward
@per_outcome
def ink_amount(prompt: Prompt, outcome: Outcome) -> float | None:
    """Compare the amount of the asked colour with that of a right image; places and shapes do not matter.

    1 minus the relative difference of the sums of ink, at least 0, times the share of ink of this colour. So
    one large blot is as good as the shapes. None for a prompt that asks for no shapes.
    """
    asked = asked_of(prompt.text)
    if asked is None:
        return None
    if outcome.image is None:
        return 0.0
    pixels = outcome.image.double()
    ink = (GROUND - pixels).norm(dim=0)
    wanted = torch.tensor(COLOURS[asked.colour], dtype=torch.float64)
    full = float((GROUND - wanted).norm())
    line = (GROUND - wanted) / full
    own = ((GROUND - pixels) * line[:, None, None]).sum(0).clamp(min=0)  # ink along the colour's direction
    area = float(ink.sum()) / full
    right = float(_cover(asked.shape).sum()) * asked.count
    pure = float(own.square().sum() / ink.square().sum().clamp(min=1))
    return max(0.0, 1 - abs(area / right - 1)) * pure
