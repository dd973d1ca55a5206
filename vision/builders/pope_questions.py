"""Builder of POPE questions about any images whose objects are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, valid_rows, write_rows
from mmrl.vision.benchmarks.pope import TEMPLATE, Strategy, build_questions
from mmrl.vision.media.dataset_writer import BuildLog


@builder
@dataclass(kw_only=True)
class PopeQuestions:
    """Generate yes/no questions about objects in images, in POPE's files (arXiv 2305.10355).

    Half of the objects are absent. Writes one file per strategy, `{strategy}.jsonl`, for `vision.pope`.

    Args:
        source: Rows with `image` and `objects`, as for `vision.closed_vocabulary`.
        strategies: How absent objects are chosen: at random, the most frequent ones (`popular`), or those
            that co-occur most often with the object asked for (`adversarial`).
        num_images: Most images to ask about.
        num_objects: Present objects asked for in each image; images with fewer are skipped.
        template: Template of the question, with `{}` for the object.
    """

    stream: Stream
    source: str
    strategies: tuple[Strategy, ...] = ("random", "popular", "adversarial")
    num_images: PositiveInt = 500
    num_objects: PositiveInt = 3
    template: str = TEMPLATE

    def build(self, output: Path) -> dict[str, Any]:
        """Write the questions; return their number by strategy."""
        source, images = Path(self.source), {}
        for row in valid_rows(source):
            match row.columns:
                case {"image": str(image), "objects": [*objects]}:
                    images.setdefault(image, []).extend(map(str, objects))
                case _:
                    raise RowError(f"{row.place}: wanted image and objects, got {sorted(row.columns)}")
        ledger = BuildLog()
        for strategy in self.strategies:
            rows = build_questions(
                images,
                strategy,
                self.stream.fixed("pope", strategy),
                num_images=self.num_images,
                num_objects=self.num_objects,
                template=self.template,
            )
            if not rows:
                raise RowError(f"no image of '{source}' has {self.num_objects} objects")
            ledger.kept[strategy] = write_rows(output / f"{strategy}.jsonl", rows)
        return ledger.finish(output, {"source": source.name, "seed": self.stream.seed})
