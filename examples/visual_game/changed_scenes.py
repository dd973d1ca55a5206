"""Builder of scenes of objects in which one was replaced, for games and comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.preference_pairs.composited_scenes import (
    BANDS,
    CompositedScenes,
    Cutout,
    box_of,
    crop,
    describe,
    flatten,
    place,
    resized,
    visible,
    write_png,
)
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder


@builder
@dataclass(kw_only=True)
class ChangedScenes(CompositedScenes):
    """Composite pairs of scenes that differ in a few objects, at the same places (Vision-Zero, VL 12.5).

    `{train,test}.jsonl` are rows for `vision.image_pairs`: `original`, `changed`, the objects of both, which
    places differ, and their boxes in pixels (left, top, right, bottom).

    Args:
        objects: Folder of RGBA images named after their object.
        backgrounds: Folder of images named after their texture; the splits use different parts of them.
        num_train: Training pairs.
        num_test: Test pairs.
        side: Side of a scene, in pixels.
        fewest: Fewest objects of a scene (the paper: 4).
        most: Most objects of a scene (the paper: 6).
        smallest: Least side of an object, as a fraction of `side`.
        largest: Largest side of an object, as a fraction of `side`.
        num_absent: Not used.
        changes: Objects that are replaced (the paper: 2).
    """

    changes: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.changes > self.fewest:
            raise ValueError(f"{self.changes} objects cannot be replaced in scenes of {self.fewest}")
        self.needed = self.most + self.changes

    def scene(
        self, split: str, number: int, cutouts: list[Cutout], textures: dict[str, Tensor], output: Path
    ) -> dict[str, Any]:
        """Write a pair of images and return its row."""
        generator = self.stream.fixed("pair", split, number)
        draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=generator))
        order = torch.randperm(len(cutouts), generator=generator).tolist()
        count = draw(self.fewest, self.most)
        original = [cutouts[i] for i in order[:count]]
        places = sorted(torch.randperm(count, generator=generator)[: self.changes].tolist())
        others = iter(order[count:])
        changed = [cutouts[next(others)] if at in places else cutout for at, cutout in enumerate(original)]
        texture = sorted(textures)[draw(0, len(textures) - 1)]
        background = crop(textures[texture], BANDS[split], self.side, generator)
        # Squares of the same sizes, so that both scenes have their objects at the same places.
        squares = [Cutout(cutout.name, "", torch.ones(4, 8, 8)) for cutout in original]
        alphas, _ = place(squares, self.side, self.smallest, self.largest, generator)
        boxes = [box_of(alpha) for alpha in alphas]
        row: dict[str, Any] = {"id": f"{split}_{number:05d}", "texture": texture, "boxes": boxes}
        for name, shown in (("original", original), ("changed", changed)):
            layers = flatten(*pasted(shown, boxes, self.side), background)
            row[name] = f"pairs/{split}_{number:05d}_{name}.png"
            (output / "pairs").mkdir(parents=True, exist_ok=True)
            write_png(output / row[name], layers["composite"])
            row[f"{name}_objects"] = [cutout.name for cutout in shown]
            row[f"{name}_caption"] = describe(row[f"{name}_objects"], texture)
        return {**row, "places": places}


def pasted(cutouts: list[Cutout], boxes: list[list[int]], side: int) -> tuple[Tensor, Tensor]:
    """Paste objects into boxes, later ones on top: visible opacities and colours, as `flatten` takes them."""
    alphas, colours = torch.zeros(len(cutouts), side, side), torch.zeros(len(cutouts), 3, side, side)
    for at, (cutout, (left, top, right, bottom)) in enumerate(zip(cutouts, boxes, strict=True)):
        scaled = resized(cutout.pixels, bottom - top, right - left)
        alphas[at, top:bottom, left:right] = scaled[3]
        colours[at, :, top:bottom, left:right] = scaled[:3]
    return visible(alphas), colours
