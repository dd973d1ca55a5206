"""Builder of POPE's yes/no questions for any images with annotated objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import torch

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, valid_rows, write_rows
from mmrl.vision.benchmarks.pope import with_article
from mmrl.vision.media.dataset_writer import BuildLog

Strategy = Literal["random", "popular", "adversarial"]


@builder
@dataclass(kw_only=True)
class PopeQuestions:
    """Generate yes/no questions about objects in images, in POPE's file format (arXiv 2305.10355).

    Half of the questions are about absent objects. Writes `{strategy}.jsonl` files for `vision.pope`.

    Args:
        source: Rows with `image` and `objects`, as for `vision.closed_vocabulary`.
        strategies: Choice of absent objects. `random`: any objects. `popular`: the most frequent.
            `adversarial`: the objects that co-occur most with the present object of the previous question.
        num_images: Maximum number of images with questions.
        num_objects: Number of present objects with a question per image. Images with fewer are skipped.
        template: Template of the question, with `{}` for the object.
    """

    stream: Stream
    source: str
    strategies: tuple[Strategy, ...] = ("random", "popular", "adversarial")
    num_images: PositiveInt = 500
    num_objects: PositiveInt = 3
    template: str = "Is there {} in the image?"

    def build(self, output: Path) -> dict[str, Any]:
        """Write the questions; return their number for each strategy."""
        source, images = Path(self.source), {}
        for row in valid_rows(source):
            match row.columns:
                case {"image": str(image), "objects": [*objects]}:
                    images.setdefault(image, []).extend(map(str, objects))  # collect all rows of an image
                case _:
                    raise RowError(f"{row.place}: wanted image and objects, got {sorted(row.columns)}")
        log = BuildLog()
        for strategy in self.strategies:
            rows = self.questions(images, strategy)
            if not rows:
                raise RowError(f"no image of '{source}' has {self.num_objects} objects")
            log.kept[strategy] = write_rows(output / f"{strategy}.jsonl", rows)
        return log.finish(output, {"source": source.name, "seed": self.stream.seed})

    def questions(self, images: Mapping[str, Sequence[str]], strategy: Strategy) -> list[dict[str, Any]]:
        """Generate question rows for `images`, which maps an image to the names of its objects.

        Each of the first `num_objects` objects of an image gives a question about it and one about a new
        absent object. The absent object is random if the strategy finds none. Ties are broken alphabetically.
        """
        objects = {image: list(dict.fromkeys(names)) for image, names in images.items()}
        frequency = Counter(name for names in objects.values() for name in names)
        together: dict[str, Counter] = {name: Counter() for name in frequency}
        for names in objects.values():
            for name, other in permutations(names, 2):  # both orders of every pair of objects in an image
                together[name][other] += 1
        full = [image for image, names in objects.items() if len(names) >= self.num_objects]
        generator, rows = self.stream.fixed("pope", strategy), []
        for i in torch.randperm(len(full), generator=generator)[: self.num_images].tolist():
            image = full[i]
            taken = set(objects[image])  # names that are present, or used in an earlier question
            for present in objects[image][: self.num_objects]:
                # With `random` the ranking is empty, so that a random object is chosen below.
                counts = {"random": {}, "popular": frequency, "adversarial": together[present]}[strategy]
                ranked = sorted(counts, key=lambda name, counts=counts: (-counts[name], name))
                absent = next((name for name in ranked if name not in taken), None)
                if absent is None:
                    rest = sorted(set(frequency) - taken)
                    if not rest:
                        raise ValueError(
                            f"no absent object is left for image '{image}'; ask for fewer objects"
                        )
                    absent = rest[int(torch.randint(len(rest), (), generator=generator))]
                taken.add(absent)
                for name, label in ((present, "yes"), (absent, "no")):
                    text = self.template.format(with_article(name))
                    rows.append({"question_id": len(rows) + 1, "image": image, "text": text, "label": label})
        return rows
