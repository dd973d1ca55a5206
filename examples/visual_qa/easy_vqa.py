"""Builder of easy-VQA, a small data set of questions about images that a package contains."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import NonNegativeInt
from mmrl.config.registry import builder
from mmrl.data.dataset_io import write_rows

SHAPES = ("circle", "rectangle", "triangle")
COLOURS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
ONTOLOGY = {"objects": {name: [] for name in (*SHAPES, *COLOURS)}}
ONTOLOGY["objects"]["gray"].append("grey")
ONTOLOGY["objects"]["rectangle"].append("square")


@builder
@dataclass(kw_only=True)
class EasyVqa:
    """Write easy-VQA (package `easy-vqa`, MIT): images of one coloured shape, questions and captions.

    `{train,test}.jsonl` are questions for `vision.visual_qa`; `{train,test}_scenes.jsonl` are images for
    `vision.closed_vocabulary` whose questions reveal both shape and colour, with a caption, these as objects
    and the other shapes and colours as absent ones; `ontology.json` lists their names.

    Args:
        source: The package's folder `data`; by default that of the installed package.
        limit: Images of each split; 0 for all.
    """

    source: str = ""
    limit: NonNegativeInt = 0

    def build(self, output: Path) -> dict[str, Any]:
        """Copy the images and write the rows; return their numbers."""
        source = Path(self.source) if self.source else package()
        counts: dict[str, Any] = {}
        for split in ("train", "test"):
            try:
                asked = json.loads((source / split / "questions.json").read_text())
            except (OSError, json.JSONDecodeError) as error:
                raise ValueError(f"'{source / split}' does not hold a split of easy-VQA: {error}") from error
            asked = [(q, a, n) for q, a, n in asked if not self.limit or n < self.limit]
            (output / "images" / split).mkdir(parents=True, exist_ok=True)
            for number in sorted({n for _, _, n in asked}):
                name = f"{number}.png"
                shutil.copyfile(source / split / "images" / name, output / "images" / split / name)
            counts[f"{split}_questions"] = write_rows(
                output / f"{split}.jsonl",
                (
                    {"id": f"{split}#{i}", "image": f"images/{split}/{n}.png", "question": q, "answer": a}
                    for i, (q, a, n) in enumerate(asked)
                ),
            )
            counts[f"{split}_scenes"] = write_rows(output / f"{split}_scenes.jsonl", _scenes(asked, split))
        (output / "ontology.json").write_text(json.dumps(ONTOLOGY, indent=1) + "\n")
        manifest = {"source": "easy-VQA 1.0", "licence": "MIT", "counts": counts}
        (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        return counts


def _scenes(asked: Iterable[tuple[str, str, int]], split: str) -> list[dict[str, Any]]:
    rows = []
    for number, (shape, colour) in sorted(shape_and_colour(asked).items()):
        name = f"images/{split}/{number}.png"
        absent = [other for other in (*SHAPES, *COLOURS) if other not in (shape, colour)]
        caption = f"a {colour} {shape}"
        row = {"id": name, "split": split, "image": name, "objects": [shape, colour], "absent": absent}
        rows.append({**row, "captions": [caption]})
    return rows


def shape_and_colour(asked: Iterable[tuple[str, str, int]]) -> dict[int, tuple[str, str]]:
    """Infer shape and colour of the images whose questions and answers reveal both.

    A yes/no question reveals what it names if the answer is yes, or if it is negated and the answer is no.
    """
    known: dict[int, set[str]] = {}
    for question, answer, number in asked:
        words = set(re.findall(r"[a-z]+", question))
        if answer in ("yes", "no"):
            true = (answer == "yes") != bool(words & {"no", "not"})
            words = words if true else set()
        known.setdefault(number, set()).update(words, {answer})
    pairs = {n: ([s for s in SHAPES if s in w], [c for c in COLOURS if c in w]) for n, w in known.items()}
    return {n: (s[0], c[0]) for n, (s, c) in pairs.items() if len(s) == len(c) == 1}


def package() -> Path:
    spec = importlib.util.find_spec("easy_vqa")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the images come with the package easy-vqa: pip install easy-vqa==1.0")
    return Path(spec.submodule_search_locations[0]) / "data"
