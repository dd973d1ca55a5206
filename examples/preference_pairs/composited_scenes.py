"""Scenes of which everything is known: cut-out pictures on textures, with exact masks, boxes and captions."""

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

TRIES = 20  # places tried for an object before it is made smaller
SHOWN = 0.6  # share of an object that others may not cover
BANDS = {"train": (0.0, 0.6), "test": (0.6, 1.0)}  # of every background: no pixel of it is in both


@dataclass(frozen=True)
class Cutout:
    """A picture with alpha: what it shows, the group of things it belongs to, and (4, height, width) in [0,
    1]."""

    name: str
    group: str
    pixels: Tensor


@builder
class CompositedScenes:
    """Compose scenes from RGBA pictures over backgrounds, and write what is in each: derived data, exact.

    `objects` is a folder of RGBA pictures named after what they show; subfolders are groups, whose other
    members are the tempting absent objects of a scene. `backgrounds` is a folder of pictures named after
    their texture; the splits show different parts of them. A scene is a folder with `composite.png`,
    `foreground.png`, `background.png`, `mask.png` (how much of the composite is foreground), a mask of every
    object as far as it is seen, and `caption.txt`; composite = mask * foreground + (1 - mask) * background up
    to rounding. `{train,test}.jsonl` are rows for `vision.closed_vocabulary`, with boxes in pixels (left,
    top, right, bottom), `ontology.json` holds the names.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        objects: str,
        backgrounds: str,
        num_train: NonNegativeInt = 1000,
        num_test: NonNegativeInt = 200,
        side: PositiveInt = 224,
        fewest: Annotated[PositiveInt, AtMost("most")] = 1,
        most: PositiveInt = 4,
        smallest: Annotated[PositiveShare, AtMost("largest")] = 0.2,
        largest: PositiveShare = 0.45,
        num_absent: NonNegativeInt = 5,
    ) -> None:
        if not 1 <= fewest <= most or not 0 < smallest <= largest <= 1:
            raise ValueError(
                f"a scene cannot hold {fewest} to {most} objects of {smallest:g} to {largest:g} of its side; "
                "wanted 1 <= fewest <= most and 0 < smallest <= largest <= 1"
            )
        self.stream, self.objects, self.backgrounds = stream, Path(objects), Path(backgrounds)
        self.num = {"train": num_train, "test": num_test}
        self.side, self.fewest, self.most = side, fewest, most
        self.smallest, self.largest, self.num_absent = smallest, largest, num_absent

    def build(self, output: Path) -> dict[str, Any]:
        """Write the scenes, and tell how many."""
        cutouts = _read_cutouts(self.objects)
        if len(cutouts) < self.most:
            raise ValueError(
                f"'{self.objects}' holds {len(cutouts)} pictures; scenes of {self.most} want as many"
            )
        textures = {path.stem: _read(path, "RGB") for path in _pictures(self.backgrounds)}
        ledger, files = BuildLog(), SplitFiles(output)
        for split, count in self.num.items():
            for number in range(count):
                files.add(split, self._scene(split, number, cutouts, textures, output))
                ledger.kept[split] += 1
        files.close()
        names = {one.name: [] for one in cutouts}
        (output / "ontology.json").write_text(json.dumps({"objects": names}, indent=1, ensure_ascii=False))
        told = {"derived": "composited from the pictures of others; their licences hold", "side": self.side}
        return ledger.finish(output, {**told, "seed": self.stream.seed, "classes": len(names)})

    def _scene(
        self, split: str, number: int, cutouts: list[Cutout], textures: dict[str, Tensor], output: Path
    ) -> dict[str, Any]:
        generator = self.stream.fixed("scene", split, number)
        draw = lambda least, most: int(torch.randint(least, most + 1, (), generator=generator))
        order = torch.randperm(len(cutouts), generator=generator).tolist()
        chosen = [cutouts[i] for i in order[: draw(self.fewest, self.most)]]
        texture = sorted(textures)[draw(0, len(textures) - 1)]
        background = crop(textures[texture], BANDS[split], self.side, generator)
        alphas, colours = place(chosen, self.side, self.smallest, self.largest, generator)
        shares = seen(alphas)
        layers = flatten(shares, colours, background)
        name = f"scenes/{split}_{number:05d}"
        (output / name).mkdir(parents=True, exist_ok=True)
        for layer, pixels in layers.items():
            _write(output / name / f"{layer}.png", pixels)
        masks = []
        for at, share in enumerate(shares):
            masks.append(f"{name}/mask_{at}.png")
            _write(output / masks[-1], (share * 255).round().byte()[None])
        caption = describe([one.name for one in chosen], texture)
        (output / name / "caption.txt").write_text(caption + "\n")
        return {
            "id": f"{split}_{number:05d}",
            "image": f"{name}/composite.png",
            "objects": [one.name for one in chosen],
            "absent": self._absent(chosen, [cutouts[i] for i in order]),
            "captions": [caption],
            "texture": texture,
            "masks": masks,
            "boxes": [box_of(share) for share in shares],
        }

    def _absent(self, chosen: list[Cutout], ordered: list[Cutout]) -> list[str]:
        """Name what might be expected: others of the same groups first."""
        names, groups = {one.name for one in chosen}, {one.group for one in chosen}
        others = [one for one in ordered if one.name not in names]
        others.sort(key=lambda one: one.group not in groups)
        return [one.name for one in others[: self.num_absent]]


def describe(names: list[str], texture: str) -> str:
    """Write a caption that names every object once."""
    listed = [f"some {name}" if singular(name) != name else with_article(name) for name in names]
    together = ", ".join(listed[:-1]) + " and " + listed[-1] if len(listed) > 1 else listed[0]
    return f"{together} on {texture}"


def crop(texture: Tensor, band: tuple[float, float], side: int, generator: torch.Generator) -> Tensor:
    """Cut a square out of a band of a (3, height, width) texture, at random, and scale it to `side`."""
    first, last = (round(share * texture.shape[2]) for share in band)
    piece = texture[:, :, first:last]
    edge = min(piece.shape[1], piece.shape[2])
    edge = max(1, round(edge * (0.6 + 0.4 * float(torch.rand((), generator=generator)))))
    top, left = (int(torch.randint(0, size - edge + 1, (), generator=generator)) for size in piece.shape[1:])
    return _resized(piece[:, top : top + edge, left : left + edge], side, side)


def place(
    cutouts: list[Cutout], side: int, smallest: float, largest: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Lay objects on a canvas where they cover little of each other: alphas (n, side, side) and colours (n,
    3, side, side). Later ones lie on top."""
    alphas = torch.zeros(len(cutouts), side, side)
    colours = torch.zeros(len(cutouts), 3, side, side)
    for at, one in enumerate(cutouts):
        share = smallest + (largest - smallest) * float(torch.rand((), generator=generator))
        before = seen(alphas[:at]).sum((1, 2)) if at else None
        for attempt in range(100 * TRIES):
            edge = max(2, round(share * side * 0.9 ** (attempt // TRIES)))
            scaled = _resized(one.pixels, edge, edge)
            top, left = (int(torch.randint(0, side - edge + 1, (), generator=generator)) for _ in range(2))
            window = (slice(top, top + edge), slice(left, left + edge))
            alphas[at] = 0
            alphas[at][window] = scaled[3]
            if not at or bool(
                (seen(alphas[: at + 1])[:at].sum((1, 2)) >= SHOWN * alphas[:at].sum((1, 2))).all()
            ):
                break
        else:
            raise ValueError(f"no place is left for '{one.name}' among {len(before)} objects; ask for fewer")
        colours[at][(slice(None), *window)] = scaled[:3]
    return alphas, colours


def seen(alphas: Tensor) -> Tensor:
    """Compute how much of every pixel each object makes up, the later on top: (n, side, side) to the same."""
    above = torch.ones_like(alphas[:1]) if len(alphas) else alphas
    through = torch.cat([(1 - alphas.flip(0)).cumprod(0).flip(0)[1:], above])
    return alphas * through


def flatten(shares: Tensor, colours: Tensor, background: Tensor) -> dict[str, Tensor]:
    """Merge objects to one foreground with one mask, and lay it over the background; all uint8."""
    mask = shares.sum(0).clamp(0, 1)
    foreground = (shares[:, None] * colours).sum(0) / mask.clamp(min=1e-6)
    quantized = {
        "foreground": (foreground.clamp(0, 1) * 255).round().byte(),
        "background": (background.clamp(0, 1) * 255).round().byte(),
        "mask": (mask * 255).round().byte()[None],
    }
    # From what is written, so that the parts on disk give the composite.
    front, back, part = (quantized[name].double() for name in ("foreground", "background", "mask"))
    composite = (front * part + back * (255 - part)) / 255
    return {**quantized, "composite": composite.round().byte()}


def box_of(share: Tensor) -> list[int]:
    """Find the box of the pixels that an object makes up at least half of: left, top, right, bottom, the last
    two not included."""
    rows, columns = (share >= 0.5).any(1).nonzero()[:, 0], (share >= 0.5).any(0).nonzero()[:, 0]
    if not len(rows):
        return [0, 0, 0, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def _read_cutouts(folder: Path) -> list[Cutout]:
    found: dict[str, Cutout] = {}
    for path in _pictures(folder):
        name = path.stem.replace("_", " ").lower()
        if name in found:
            raise ValueError(f"'{folder}' holds two pictures of '{name}'; names must differ")
        group = path.parent.name if path.parent != folder else ""
        found[name] = Cutout(name, group, _read(path, "RGBA"))
    return list(found.values())


def _pictures(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if is_image_file(path)) if folder.is_dir() else []
    if not found:
        raise ValueError(f"the folder '{folder}' holds no pictures")
    return found


def _read(path: Path, mode: str) -> Tensor:
    """Read a picture as (channels, height, width) in [0, 1]."""
    import numpy

    pixels = numpy.array(read_image(path, str(path), transparent=mode == "RGBA"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize; colours are weighed with their alpha, so that what is transparent does not bleed."""
    alpha = pixels[3:] if len(pixels) == 4 else torch.ones_like(pixels[:1])
    joined = torch.cat([pixels[:3] * alpha, alpha])[None]
    scaled = torch.nn.functional.interpolate(joined, (height, width), mode="bilinear", antialias=True)[0]
    colour = scaled[:3] / scaled[3:].clamp(min=1e-6)
    return torch.cat([colour, scaled[3:]])[: len(pixels)].clamp(0, 1)


def _write(path: Path, pixels: Tensor) -> None:
    """Write (channels, height, width) uint8 as PNG."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).save(path)
