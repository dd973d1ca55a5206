"""An environment with a grid: the policy sees it as an image and moves on it."""

from __future__ import annotations

import random
from typing import Annotated, Any

from mmrl.config.ranges import PositiveInt, Range
from mmrl.config.registry import environment

STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
FLOOR, LINE, GOAL, AGENT = "#f2f2f2", "#b0b0b0", "#2a9d3a", "#d62828"


@environment
class GridWorld:
    """Environment: move a red dot to a green square on a grid; every move returns an image.

    The reward is 1 if the dot is on the green square, otherwise 0. The reward of a turn is 1 if its moves
    brought the dot nearer, otherwise 0. The seed of `reset` sets both positions.
    """

    def __init__(self, *, size: Annotated[int, Range(2)] = 4, cell_pixels: PositiveInt = 28) -> None:
        self.size, self.cell = size, cell_pixels

    def reset(self, seed: int | None = None, **columns: Any) -> list:
        """Choose random positions for the dot and the square; return the task and an image of the grid."""
        places = [(x, y) for y in range(self.size) for x in range(self.size)]
        self.agent, self.goal = random.Random(seed).sample(places, 2)
        self.before = self._distance()
        return [{"type": "text", "text": "Bring the red dot to the green square."}, self._image()]

    def move(self, direction: str, cells: int = 1) -> list:
        """Move the red dot; it stops at the edge.

        Args:
            direction: up, down, left or right.
            cells: How many cells.
        """
        if direction not in STEPS:
            raise ValueError(f"there is no direction {direction!r:.20}; there are {', '.join(STEPS)}")
        last = self.size - 1
        step = zip(self.agent, STEPS[direction], strict=True)
        self.agent = tuple(min(max(place + cells * way, 0), last) for place, way in step)
        return [self._image(), {"type": "text", "text": "arrived" if self.agent == self.goal else "not yet"}]

    def get_reward(self) -> float:
        """Return 1 if the red dot is on the green square, else 0."""
        return float(self.agent == self.goal)

    def get_turn_reward(self) -> float:
        """Return 1 if the turn brought the dot nearer to the green square, else 0."""
        before, self.before = self.before, self._distance()
        return float(self.before < before)

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self.agent, self.goal, strict=True))

    def _image(self) -> dict[str, Any]:
        from PIL import Image, ImageDraw

        cell, side = self.cell, self.cell * self.size
        image = Image.new("RGB", (side, side), FLOOR)
        draw = ImageDraw.Draw(image)
        for at in range(0, side, cell):
            draw.line((at, 0, at, side), LINE)
            draw.line((0, at, side, at), LINE)
        for (x, y), color, shape in ((self.goal, GOAL, draw.rectangle), (self.agent, AGENT, draw.ellipse)):
            shape((x * cell + 3, y * cell + 3, (x + 1) * cell - 3, (y + 1) * cell - 3), color)
        return {"type": "image", "image": image}
