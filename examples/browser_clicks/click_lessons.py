"""Builder of lessons in clicking: screenshots of pages, and clicks, of which a share can be misplaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import ImageColor

from mmrl.config.ranges import PositiveInt, Probability
from mmrl.config.registry import builder
from mmrl.core.rng import Stream
from mmrl.data.dataset_io import write_rows
from mmrl.vision.environments.browser import Browser
from mmrl.vision.environments.browser_tasks import COLORS, KINDS
from mmrl.vision.environments.chromium import CONCURRENT

TASK = "click_color"
NAMES = {ImageColor.getrgb(color): name for name, color in COLORS.items()}
CALL = (
    '<tool_call>\n{{"name": "computer_use", "arguments": {{"action": "left_click", '
    '"coordinate": [{}, {}]}}}}\n</tool_call>'
)


@builder
@dataclass(kw_only=True)
class ClickLessons:
    """Write `{train,test}.jsonl`, rows that name a page by its seed, and `lessons.jsonl` with screenshots.

    A lesson is a row of `vision.conversations`: the goal, a screenshot and a click. Every square of a page is
    asked for once. The pages of lessons are not those of the other rows.

    Args:
        num_train: Pages to practise on.
        num_test: Held-out pages.
        labelled: Pages with lessons.
        size: Side of a page in pixels, as in the environment.
        cells: Cells along a side, as in the environment.
        aim: Share of clicks that are meant for the named square; the others go anywhere.
        executable: Path or name of Chromium, as in the environment.
    """

    stream: Stream
    num_train: PositiveInt = 400
    num_test: PositiveInt = 100
    labelled: PositiveInt = 250
    size: PositiveInt = 48
    cells: PositiveInt = 3
    aim: Probability = 1.0
    executable: str = ""

    def build(self, output: Path) -> dict[str, Any]:
        """Write screenshots and rows; return the number of rows."""
        (output / "shots").mkdir(parents=True, exist_ok=True)
        numbers = iter(range(self.num_train + self.num_test + self.labelled))
        first = self.stream.seed_of("pages")
        rows = {
            split: [
                {"id": f"{split} {at}", "environment": "browser", "task": TASK, "seed": first + next(numbers)}
                for at in range(count)
            ]
            for split, count in (("train", self.num_train), ("test", self.num_test))
        }
        with ThreadPoolExecutor(CONCURRENT) as pool:  # each waits for the browser
            pages = [(output, at, first + next(numbers)) for at in range(self.labelled)]
            rows["lessons"] = [
                row for lessons in pool.map(self._of, *zip(*pages, strict=True)) for row in lessons
            ]
        return {name: write_rows(output / f"{name}.jsonl", some) for name, some in rows.items()}

    def _of(self, output: Path, number: int, seed: int) -> list[dict[str, Any]]:
        """List the lessons about a page: a click for each of its squares, and once what follows."""
        game = Browser(size=self.size, cells=self.cells, executable=self.executable)
        image = game.reset(seed=seed, task=TASK)[1]["image"]
        shot, cell = f"shots/{number}.png", self.size // self.cells
        image.save(output / shot)
        generator = self.stream.fixed("lessons", number)
        rows = []
        for at in range(self.cells**2):
            corner = at % self.cells * cell, at // self.cells * cell
            name = NAMES.get(image.getpixel((corner[0] + cell // 2, corner[1] + cell // 2)))
            if name is None:
                continue
            if torch.rand((), generator=generator) >= self.aim:
                corner = [cell * drawn(self.cells, generator) for _ in range(2)]
            call = CALL.format(*(edge + cell // 4 + cell // 2 * drawn(2, generator) for edge in corner))
            goal = KINDS[TASK].goal.format(name)
            user = {"role": "user", "content": f"{goal}<image>"}
            asked = [{"role": "system", "content": "computer_use"}, user]
            lesson = {"images": [shot], "prompt": asked, "color": name}
            rows.append({**lesson, "id": f"{number} {name}", "completion": call, "answer": call})
        told = [{"role": "assistant", "content": call}, {"role": "user", "content": "The task is over."}]
        over = {
            **lesson,
            "prompt": [*asked, *told],
            "id": f"{number} over",
            "completion": "done",
            "answer": "done",
        }
        return [*rows, over]


def drawn(most: int, generator: torch.Generator) -> int:
    """Draw a whole number from 0 to `most` - 1."""
    return int(torch.randint(most, (), generator=generator))
