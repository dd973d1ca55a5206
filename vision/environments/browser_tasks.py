"""Tasks on small web pages: the page, its goal and the final state of its fields, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

TaskName = Literal[
    "click_button", "click_color", "click_shape", "tick_boxes", "type_word", "choose_option", "scroll_list"
]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
COLORS = {
    "red": "#d62828", "green": "#2a9d3a", "blue": "#1d4ed8", "yellow": "#f6c915",
    "purple": "#8e24aa", "orange": "#f77f00",
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
WORDS = (
    "Apple", "Bread", "Cheese", "Dates", "Eggs", "Figs", "Grapes", "Honey",
    "Jam", "Lemon", "Milk", "Nuts", "Olives", "Pears", "Rice", "Tea",
)  # fmt: skip
END = "end"  # name of fields whose choice ends the task
State = dict[str, list[str]]  # the chosen or written values of the fields of a page, by name


@dataclass(frozen=True)
class Kind:
    """A kind of task: template of its goal, and the choices on the page.

    Args:
        goal: The instruction; `{}` is replaced by the wanted choices.
        choices: Texts of the possible choices.
        shown: Number of choices on a page.
        wanted: Number of choices that the goal names.
    """

    goal: str
    choices: Sequence[str]
    shown: int = 4
    wanted: int = 1


KINDS: Mapping[TaskName, Kind] = {
    "click_button": Kind("Click the button {}.", WORDS),
    "click_color": Kind("Click the {} square.", tuple(COLORS)),
    "click_shape": Kind("Click the {}.", tuple(map(" ".join, product(COLORS, SHAPES)))),
    "tick_boxes": Kind("Tick {} and click Submit.", WORDS, 5, 2),
    "type_word": Kind("Type {} into the field and click Submit.", WORDS, 1),
    "choose_option": Kind("Choose {} in the list and click Submit.", WORDS, 5),
    "scroll_list": Kind("Scroll down and click the button {}.", WORDS, 12),
}


@dataclass(frozen=True)
class Task:
    """A drawn task.

    Args:
        goal: The instruction.
        html: The page, without scripts and without references to other files.
        target: The values of the page's fields once the task is solved.
    """

    goal: str
    html: str
    target: State

    def reward(self, state: Mapping[str, Sequence[str]]) -> float:
        """Return 1 if all fields are as the goal says and the task was ended, else 0."""
        return float(state == self.target)


def make_task(name: TaskName, seed: int | None, cells: int = 3) -> Task:
    """Draw a task from a seed, reproducibly. Choices lie on a grid of `cells` squared."""
    kind, draw = KINDS[name], random.Random(seed)
    shown = draw.sample(kind.choices, kind.shown)
    # In scrollable lists the goal names only the later half, which is not visible at first.
    places = range(kind.shown // 2 if name == "scroll_list" else 0, kind.shown)
    wanted = [shown[place] for place in sorted(draw.sample(places, kind.wanted))]
    grid = draw.sample(range(cells * cells), kind.shown) if name.startswith("click") else []
    placed = [(choice, at % cells + 1, at // cells + 1) for choice, at in zip(shown, grid, strict=False)]
    html = _template(name).render(cells=cells, placed=placed, choices=shown, colors=COLORS)
    submits = "Submit" in kind.goal
    target = {"answer": wanted, END: ["submit"]} if submits else {END: wanted}
    return Task(kind.goal.format(" and ".join(wanted)), html, target)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = FileSystemLoader(Path(__file__).parent / "pages")
    environment = Environment(loader=pages, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(f"{name}.html")
