"""Builder of captioned images from easy-VQA, a few thousand images in a Python package."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import builder
from mmrl.data.media import read_image

SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SPLITS = ("train", "test")


@builder
class EasyVqaCaptions:
    """Caption the images of easy-VQA, one shape of one colour each, from its questions (MIT licence).

    An image whose answered questions determine both shape and colour gets a caption such as "a teal
    triangle"; the others are left out. Writes `{train,test}.jsonl` in the splits of the data set for
    `diffusion.images`, `prompts.jsonl` with every caption once for `diffusion.prompts`, and `manifest.json`.

    Args:
        source: The package's folder `data`; by default that of the installed package.
        window: Side of the square that is cropped around the shape, of 64 pixels.
        side: Side that the crop is shrunk to, pixels.
        limit: Most images of a split; 0 is all.
    """

    def __init__(
        self, *, source: str = "", window: PositiveInt = 40, side: PositiveInt = 24, limit: NonNegativeInt = 0
    ) -> None:
        self.source, self.window, self.side, self.limit = source, window, side, limit

    def build(self, output: Path) -> dict[str, Any]:
        """Write images and rows, and report how many."""
        source = Path(self.source) if self.source else _package_data()
        counts, captions = {}, Counter()
        for split in SPLITS:
            rows = self._write(source / split, output, split)
            captions.update(row["prompt"] for row in rows)
            counts[f"{split}_images"] = len(rows)
        _write_rows(output / "prompts.jsonl", [{"id": text, "prompt": text} for text in sorted(captions)])
        counts["captions"] = len(captions)
        manifest = {"source": "easy-VQA 1.0", "licence": "MIT", "window": self.window, "side": self.side}
        manifest |= counts
        (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        return counts

    def _write(self, folder: Path, output: Path, split: str) -> list[dict[str, Any]]:
        """Crop and shrink the images of one split."""
        import numpy
        from PIL import Image

        try:
            questions = json.loads((folder / "questions.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"'{folder}' does not hold a split of easy-VQA: {error}") from error
        (output / split).mkdir(parents=True, exist_ok=True)
        rows = []
        for number, (shape, colour) in sorted(facts(questions).items()):
            name = f"{split}/{number:04d}.png"
            path = folder / "images" / f"{number}.png"
            whole = read_image(path, str(path))
            box = crop_around_shape(torch.from_numpy(numpy.array(whole)).permute(2, 0, 1), self.window)
            whole.resize((self.side, self.side), Image.Resampling.BOX, box).save(output / name)
            row = {"id": name, "prompt": f"a {colour} {shape}", "image": name}
            rows.append({**row, "shape": shape, "colour": colour})
            if len(rows) == self.limit:
                break
        _write_rows(output / f"{split}.jsonl", rows)
        return rows


def facts(questions: Iterable[tuple[str, str, int]]) -> dict[int, tuple[str, str]]:
    """Infer shape and colour of the images from (question, answer, image) rows, where both are certain.

    The words of a question and its answer are true of the image if it asks "what", if yes answers it, or if
    no answers its negation.
    """
    mentioned: dict[int, set[str]] = {}
    for question, answer, number in questions:
        words = re.findall(r"[a-z]+", question.lower())
        negated = bool({"no", "not"} & {*words})
        if answer in ("yes", "no") and (answer == "no") != negated:
            continue
        mentioned.setdefault(int(number), set()).update([*words, answer])
    known = {}
    for number, words in mentioned.items():
        shapes, colours = words.intersection(SHAPES), words.intersection(COLOURS)
        if len(shapes) == len(colours) == 1:
            known[number] = (*shapes, *colours)
    return known


def crop_around_shape(image: Tensor, window: int) -> tuple[int, int, int, int]:
    """Find the square of `window` pixels around what differs from the border: left, top, right, bottom."""
    border = torch.cat([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], 1)
    away = (image.float() - border.median(1).values[:, None, None]).norm(dim=0)
    edges = []
    for axis, size in ((0, image.shape[2]), (1, image.shape[1])):
        places = (away.amax(axis) > 0.5 * away.max()).nonzero()[:, 0]
        middle = (int(places[0]) + int(places[-1]) + 1) / 2
        edges.append(min(max(0, round(middle - window / 2)), max(0, size - window)))
    return edges[0], edges[1], edges[0] + window, edges[1] + window


def _package_data() -> Path:
    """Find the folder `data` of the installed package."""
    spec = importlib.util.find_spec("easy_vqa")
    if spec is None:
        raise ImportError("the images come with the package easy-vqa: pip install easy-vqa==1.0")
    return Path(spec.submodule_search_locations[0]) / "data"


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
