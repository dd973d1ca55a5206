"""Builder of composited scenes: cut-out objects on textures, with exact masks, boxes and captions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from mmrl.config.ranges import AtMost, NonNegativeInt, PositiveInt, PositiveShare
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.media import read_image
from mmrl.vision.benchmarks.caption_words import singular
from mmrl.vision.benchmarks.pope import with_article
from mmrl.vision.media.dataset_writer import BuildLog, SplitFiles, is_image_file

TRIES = 20  # places tried for an object before it shrinks
SHOWN = 0.6  # least visible share of an object
BANDS = {"train": (0.0, 0.6), "test": (0.6, 1.0)}  # of every background; the splits share no pixel


@dataclass(frozen=True)
class Cutout:
    """An object image: its name, its group, and (4, height, width) RGBA in [0, 1]."""

    name: str
    group: str
    pixels: Tensor


@builder
@dataclass(kw_only=True)
class CompositedScenes:
    """Composite RGBA objects on backgrounds, with exact masks, boxes, captions and object lists.

    A scene is a folder with `composite.png`, `foreground.png`, `background.png`, `mask.png` (opacity of the
    foreground), a mask of the visible part of every object, and `caption.txt`; composite = mask * foreground
    + (1 - mask) * background up to rounding. `{train,test}.jsonl` are rows for `vision.closed_vocabulary`,
    with boxes in pixels (left, top, right, bottom); `ontology.json` lists the names.

    Args:
        objects: Folder of RGBA images named after their object; subfolders are groups, whose other members
            are the tempting absent objects of a scene.
        backgrounds: Folder of images named after their texture; the splits use different parts of them.
        num_train: Training scenes.
        num_test: Test scenes.
        side: Side of a scene, in pixels.
        fewest: Fewest objects of a scene.
        most: Most objects of a scene.
        smallest: Least side of an object, as a fraction of `side`.
        largest: Largest side of an object, as a fraction of `side`.
        num_absent: Absent objects listed with a scene.
    """

    stream: Stream
    objects: str
    backgrounds: str
    num_train: NonNegativeInt = 1000
    num_test: NonNegativeInt = 200
    side: PositiveInt = 224
    fewest: Annotated[PositiveInt, AtMost("most")] = 1
    most: PositiveInt = 4
    smallest: Annotated[PositiveShare, AtMost("largest")] = 0.2
    largest: PositiveShare = 0.45
    num_absent: NonNegativeInt = 5

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most or not 0 < self.smallest <= self.largest <= 1:
            raise ValueError(
                f"a scene cannot have {self.fewest} to {self.most} objects of {self.smallest:g} to "
                f"{self.largest:g} of its side; wanted 1 <= fewest <= most and 0 < smallest <= largest <= 1"
            )

        self.needed = self.most  # objects of a scene

    def build(self, output: Path) -> dict[str, Any]:
        """Write the scenes; return the number of each split."""
        cutouts = _read_cutouts(Path(self.objects))
        if len(cutouts) < self.needed:
            raise ValueError(
                f"'{self.objects}' has {len(cutouts)} images; such scenes of {self.most} objects need "
                f"{self.needed}"
            )
        textures = {path.stem: _read(path, "RGB") for path in _image_files(Path(self.backgrounds))}
        ledger, files = BuildLog(), SplitFiles(output)
        for split, count in (("train", self.num_train), ("test", self.num_test)):
            for number in range(count):
                files.add(split, self.scene(split, number, cutouts, textures, output))
                ledger.kept[split] += 1
        files.close()
        names = {cutout.name: [] for cutout in cutouts}
        (output / "ontology.json").write_text(json.dumps({"objects": names}, indent=1, ensure_ascii=False))
        origin = {"derived": "composited from images of others; their licences apply", "side": self.side}
        return ledger.finish(output, {**origin, "seed": self.stream.seed, "classes": len(names)})

    def scene(
        self, split: str, number: int, cutouts: list[Cutout], textures: dict[str, Tensor], output: Path
    ) -> dict[str, Any]:
        """Write the images of a scene and return its row."""
        generator = self.stream.fixed("scene", split, number)
        draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=generator))
        order = torch.randperm(len(cutouts), generator=generator).tolist()
        chosen = [cutouts[i] for i in order[: draw(self.fewest, self.most)]]
        texture = sorted(textures)[draw(0, len(textures) - 1)]
        background = crop(textures[texture], BANDS[split], self.side, generator)
        alphas, colours = place(chosen, self.side, self.smallest, self.largest, generator)
        shares = visible(alphas)
        layers = flatten(shares, colours, background)
        name = f"scenes/{split}_{number:05d}"
        (output / name).mkdir(parents=True, exist_ok=True)
        for layer, pixels in layers.items():
            write_png(output / name / f"{layer}.png", pixels)
        masks = []
        for at, share in enumerate(shares):
            masks.append(f"{name}/mask_{at}.png")
            write_png(output / masks[-1], (share * 255).round().byte()[None])
        caption = describe([cutout.name for cutout in chosen], texture)
        (output / name / "caption.txt").write_text(caption + "\n")
        return {
            "id": f"{split}_{number:05d}",
            "image": f"{name}/composite.png",
            "objects": [cutout.name for cutout in chosen],
            "absent": self._absent(chosen, [cutouts[i] for i in order]),
            "captions": [caption],
            "texture": texture,
            "masks": masks,
            "boxes": [box_of(share) for share in shares],
        }

    def _absent(self, chosen: list[Cutout], ordered: list[Cutout]) -> list[str]:
        """List tempting absent objects: others of the same groups first."""
        names, groups = {cutout.name for cutout in chosen}, {cutout.group for cutout in chosen}
        others = [cutout for cutout in ordered if cutout.name not in names]
        others.sort(key=lambda cutout: cutout.group not in groups)
        return [cutout.name for cutout in others[: self.num_absent]]


def describe(names: list[str], texture: str) -> str:
    """Compose a caption that names every object once."""
    listed = [f"some {name}" if singular(name) != name else with_article(name) for name in names]
    together = ", ".join(listed[:-1]) + " and " + listed[-1] if len(listed) > 1 else listed[0]
    return f"{together} on {texture}"


def crop(texture: Tensor, band: tuple[float, float], side: int, generator: torch.Generator) -> Tensor:
    """Crop a random square from a band of a (3, height, width) texture, resized to `side`."""
    first, last = (round(share * texture.shape[2]) for share in band)
    piece = texture[:, :, first:last]
    edge = min(piece.shape[1], piece.shape[2])
    edge = max(1, round(edge * (0.6 + 0.4 * float(torch.rand((), generator=generator)))))
    top, left = (int(torch.randint(0, size - edge + 1, (), generator=generator)) for size in piece.shape[1:])
    return resized(piece[:, top : top + edge, left : left + edge], side, side)


def place(
    cutouts: list[Cutout], side: int, smallest: float, largest: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Place objects at random with little occlusion; later ones are on top.

    Returns alphas (n, side, side) and colours (n, 3, side, side).
    """
    alphas = torch.zeros(len(cutouts), side, side)
    colours = torch.zeros(len(cutouts), 3, side, side)
    for at, cutout in enumerate(cutouts):
        share = smallest + (largest - smallest) * float(torch.rand((), generator=generator))
        for attempt in range(100 * TRIES):
            edge = max(2, round(share * side * 0.9 ** (attempt // TRIES)))
            scaled = resized(cutout.pixels, edge, edge)
            top, left = (int(torch.randint(0, side - edge + 1, (), generator=generator)) for _ in range(2))
            window = (slice(top, top + edge), slice(left, left + edge))
            alphas[at] = 0
            alphas[at][window] = scaled[3]
            if not at or bool(
                (visible(alphas[: at + 1])[:at].sum((1, 2)) >= SHOWN * alphas[:at].sum((1, 2))).all()
            ):
                break
        else:
            raise ValueError(f"no place is left for '{cutout.name}' among {at} objects; ask for fewer")
        colours[at][(slice(None), *window)] = scaled[:3]
    return alphas, colours


def visible(alphas: Tensor) -> Tensor:
    """Compute the visible opacity of each object, later ones on top: (n, side, side) to the same."""
    above = torch.ones_like(alphas[:1]) if len(alphas) else alphas
    through = torch.cat([(1 - alphas.flip(0)).cumprod(0).flip(0)[1:], above])
    return alphas * through


def flatten(shares: Tensor, colours: Tensor, background: Tensor) -> dict[str, Tensor]:
    """Merge objects to a foreground with a mask, and composite it on the background; all uint8."""
    mask = shares.sum(0).clamp(0, 1)
    foreground = (shares[:, None] * colours).sum(0) / mask.clamp(min=1e-6)
    quantized = {
        "foreground": (foreground.clamp(0, 1) * 255).round().byte(),
        "background": (background.clamp(0, 1) * 255).round().byte(),
        "mask": (mask * 255).round().byte()[None],
    }
    # From the rounded parts, so that those on disk give the composite exactly.
    front, back, part = (quantized[name].double() for name in ("foreground", "background", "mask"))
    composite = (front * part + back * (255 - part)) / 255
    return {**quantized, "composite": composite.round().byte()}


def box_of(share: Tensor) -> list[int]:
    """Compute the box of pixels with opacity of at least 0.5: left, top, right, bottom (exclusive)."""
    rows, columns = (share >= 0.5).any(1).nonzero()[:, 0], (share >= 0.5).any(0).nonzero()[:, 0]
    if not len(rows):
        return [0, 0, 0, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def _read_cutouts(folder: Path) -> list[Cutout]:
    cutouts: dict[str, Cutout] = {}
    for path in _image_files(folder):
        name = path.stem.replace("_", " ").lower()
        if name in cutouts:
            raise ValueError(f"'{folder}' has two images of '{name}'; names must differ")
        group = path.parent.name if path.parent != folder else ""
        cutouts[name] = Cutout(name, group, _read(path, "RGBA"))
    return list(cutouts.values())


def _image_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if is_image_file(path)) if folder.is_dir() else []
    if not paths:
        raise ValueError(f"the folder '{folder}' has no images")
    return paths


def _read(path: Path, mode: str) -> Tensor:
    """Read an image as (channels, height, width) in [0, 1]."""
    import numpy

    pixels = numpy.array(read_image(path, str(path), transparent=mode == "RGBA"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize; colours are weighted with alpha, so that transparent pixels do not bleed."""
    alpha = pixels[3:] if len(pixels) == 4 else torch.ones_like(pixels[:1])
    joined = torch.cat([pixels[:3] * alpha, alpha])[None]
    scaled = torch.nn.functional.interpolate(joined, (height, width), mode="bilinear", antialias=True)[0]
    colour = scaled[:3] / scaled[3:].clamp(min=1e-6)
    return torch.cat([colour, scaled[3:]])[: len(pixels)].clamp(0, 1)


def write_png(path: Path, pixels: Tensor) -> None:
    """Write (channels, height, width) uint8 as PNG."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(path)
