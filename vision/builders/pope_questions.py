"""Questions of POPE about any pictures of which the objects are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import RowError, valid_rows, write_rows
from mmrl.vision.benchmarks.pope import TEMPLATE, build_questions
from mmrl.vision.media.dataset_writer import BuildLog

STRATEGIES = ("random", "popular", "adversarial")


@builder
class PopeQuestions:
    """Ask whether objects are in pictures, in the files of POPE (arXiv 2305.10355): half of them are not.

    `source` are rows with `image` and `objects`, as for `vision.closed_vocabulary`. Writes one file per
    strategy, `{strategy}.jsonl`, for `vision.pope`. Pictures with fewer than `num_objects` objects are not
    asked about.
    """

    def __init__(
        self,
        *,
        stream: Stream,
        source: str,
        strategies: tuple[Literal["random", "popular", "adversarial"], ...] = STRATEGIES,
        num_images: PositiveInt = 500,
        num_objects: PositiveInt = 3,
        template: str = TEMPLATE,
    ) -> None:
        self.stream, self.source, self.strategies = stream, Path(source), strategies
        self.num_images, self.num_objects, self.template = num_images, num_objects, template

    def build(self, output: Path) -> dict[str, Any]:
        """Write the questions, and tell how many."""
        pictures: dict[str, list[str]] = {}
        for row in valid_rows(self.source):
            match row.columns:
                case {"image": str(image), "objects": [*objects]}:
                    pictures.setdefault(image, []).extend(map(str, objects))
                case _:
                    raise RowError(f"{row.place}: wanted image and objects, got {sorted(row.columns)}")
        ledger = BuildLog()
        for strategy in self.strategies:
            rows = build_questions(
                pictures,
                strategy,
                self.stream.fixed("pope", strategy),
                num_images=self.num_images,
                num_objects=self.num_objects,
                template=self.template,
            )
            if not rows:
                raise RowError(f"no picture of '{self.source}' has {self.num_objects} objects")
            ledger.kept[strategy] = write_rows(output / f"{strategy}.jsonl", rows)
        return ledger.finish(output, {"source": self.source.name, "seed": self.stream.seed})
