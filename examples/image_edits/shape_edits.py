"""Builder of images of coloured shapes with instructions that edit them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator

from examples.image_rl.coloured_shape import COLOURS
from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import write_rows

BLOCK, CELL, CELLS = 16, 2, 3  # side of a block in pixels, of a cell in blocks, of an image in cells
SHAPES = {"square": ("XX", "XX"), "bar": ("..", "XX"), "dot": ("X.", "..")}  # the blocks of a cell
USED = ("blue", "green", "red", "yellow")  # colours of shapes
GROUND = (245, 245, 245)
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # rows, columns
TEXTS = {
    "recolour": "make the {shape} {value}",
    "move": "move the {shape} {value}",
    "remove": "remove the {shape}",
}
VALUES = {"recolour": USED, "move": tuple(DIRECTIONS), "remove": ("",)}


class Placed(NamedTuple):
    """A shape of an image: its colour, and the row and column of its cell."""

    colour: str
    row: int
    column: int


Scene = dict[str, Placed]  # by shape


@dataclass(frozen=True)
class Edit:
    """An instruction: `value` is the new colour or the direction, empty for `remove`."""

    kind: str
    shape: str
    value: str

    @property
    def text(self) -> str:
        """The instruction in words."""
        return TEXTS[self.kind].format(**asdict(self))

    def apply(self, scene: Scene) -> Scene | None:
        """Edit a scene; None where the shape has the colour already, or its new cell is not free."""
        now = scene[self.shape]
        others = {shape: placed for shape, placed in scene.items() if shape != self.shape}
        if self.kind == "remove":
            return others
        if self.kind == "recolour":
            changed = {**scene, self.shape: now._replace(colour=self.value)}
            return None if changed == scene else changed
        down, right = DIRECTIONS[self.value]
        moved = now._replace(row=now.row + down, column=now.column + right)
        inside = 0 <= moved.row < CELLS and 0 <= moved.column < CELLS
        free = all(placed[1:] != moved[1:] for placed in others.values())
        return {**scene, self.shape: moved} if inside and free else None


EDITS = tuple(Edit(kind, shape, value) for kind in TEXTS for shape, value in product(SHAPES, VALUES[kind]))
BY_TEXT = {edit.text: edit for edit in EDITS}


@builder
@dataclass(kw_only=True)
class ShapeEdits:
    """Draw images of three shapes with instructions that edit them.

    The 3 x 3 cells of an image hold a square, a bar and a dot, one shape in a cell at most. A cell has 2 x 2
    blocks of 16 x 16 pixels, each of one colour. `pairs.jsonl` has rows for `diffusion.edits` with an edited
    image; in a share of the rows it shows another edit of the same image. `train.jsonl` and `test.jsonl` have
    right edits, a mask of the cells that change, and the shapes after the edit.

    Args:
        num_pairs: Rows of `pairs.jsonl`.
        num_train: Rows of `train.jsonl`.
        num_test: Rows of `test.jsonl`.
        wrong: Share of wrong edits in `pairs.jsonl`.
    """

    stream: Stream
    num_pairs: PositiveInt = 1500
    num_train: PositiveInt = 400
    num_test: PositiveInt = 200
    wrong: Probability = 0.2

    def build(self, output: Path) -> dict[str, Any]:
        """Write images and rows; return the number of rows."""
        counts = {"pairs": self.num_pairs, "train": self.num_train, "test": self.num_test}
        return {
            name: write_rows(output / f"{name}.jsonl", [*self._rows(output, name, count)])
            for name, count in counts.items()
        }

    def _rows(self, output: Path, split: str, count: int) -> Iterator[dict[str, Any]]:
        (output / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            generator = self.stream.fixed("shape edits", split, number)
            scene, edit = draw(generator)
            after = edit.apply(scene)
            assert after is not None, "only edits that can be made are drawn"
            row: dict[str, Any] = {"id": f"{split} {number}", "prompt": edit.text}
            files = {name: f"{split}/{number:05d}_{name}.png" for name in ("image", "edited_image", "mask")}
            scene_image(scene).save(output / files["image"])
            if split == "pairs":
                del files["mask"]
                if torch.rand((), generator=generator) < self.wrong:
                    others = [other for other in possible(scene) if other != edit]
                    after = others[pick(len(others), generator)].apply(scene) or {}
            else:
                mask_image(scene, after).save(output / files["mask"])
                row["after"] = {shape: list(placed) for shape, placed in after.items()}
            scene_image(after).save(output / files["edited_image"])
            yield row | files


def draw(generator: Generator) -> tuple[Scene, Edit]:
    """Draw a scene and an edit of it; all kinds of edits are equally likely."""
    while True:
        cells = torch.randperm(CELLS * CELLS, generator=generator)[: len(SHAPES)].tolist()
        scene = {
            shape: Placed(USED[pick(len(USED), generator)], *divmod(cell, CELLS))
            for shape, cell in zip(SHAPES, cells, strict=True)
        }
        kind = [*TEXTS][pick(len(TEXTS), generator)]
        if edits := [edit for edit in possible(scene) if edit.kind == kind]:
            return scene, edits[pick(len(edits), generator)]


def possible(scene: Scene) -> list[Edit]:
    """List the edits that a scene allows."""
    return [edit for edit in EDITS if edit.shape in scene and edit.apply(scene) is not None]


def pick(count: int, generator: Generator) -> int:
    """Draw a number below `count`."""
    return int(torch.randint(count, (), generator=generator))


def scene_image(scene: Scene) -> Any:
    """Draw a scene: a Pillow image."""
    from PIL import Image

    side = CELL * CELLS
    image = Image.new("RGB", (side, side), GROUND)
    for shape, placed in scene.items():
        for row, column in product(range(CELL), repeat=2):
            if SHAPES[shape][row][column] == "X":
                place = (placed.column * CELL + column, placed.row * CELL + row)
                image.putpixel(place, COLOURS[placed.colour])
    return image.resize((side * BLOCK, side * BLOCK), Image.Resampling.NEAREST)


def mask_image(before: Scene, after: Scene) -> Any:
    """Draw a white square in every cell that an edit changes, on black: a Pillow image."""
    from PIL import Image

    side = CELL * BLOCK
    image = Image.new("L", (CELLS * side, CELLS * side))
    for _, placed in set(before.items()) ^ set(after.items()):
        left, top = placed.column * side, placed.row * side
        image.paste(255, (left, top, left + side, top + side))
    return image
