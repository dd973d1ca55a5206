"""An environment with web pages: the policy sees screenshots, and clicks, types and scrolls."""

from __future__ import annotations

import io
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

from mmrl.config.ranges import NonNegativeInt, Range
from mmrl.config.registry import environment
from mmrl.vision.environments.browser_tasks import END, TASK_NAMES, TaskName, make_task
from mmrl.vision.environments.chromium import SCROLL, chromium, fields_of, find_chromium

MAX_TYPED = 200  # maximum number of characters that one action `type` writes
MAX_SCROLL = 10_000  # maximum number of pixels that one action `scroll` moves the page
# Keys that a model may press, with Playwright's names.
KEYS = {
    "enter": "Enter", "return": "Enter", "tab": "Tab", "space": "Space", "backspace": "Backspace",
    "delete": "Delete", "escape": "Escape", "esc": "Escape", "up": "ArrowUp", "down": "ArrowDown",
    "left": "ArrowLeft", "right": "ArrowRight", "home": "Home", "end": "End",
    "page_up": "PageUp", "page_down": "PageDown",
    "shift+tab": "Shift+Tab", "ctrl+a": "Control+a",
}  # fmt: skip
Action = Literal["left_click", "double_click", "type", "key", "scroll", "terminate"]
TAKES: Mapping[Action, str] = {  # maps every action to its argument
    "left_click": "coordinate", "double_click": "coordinate", "type": "text", "key": "keys",
    "scroll": "pixels", "terminate": "status",
}  # fmt: skip
Input = tuple[Any, ...]  # a method of Playwright's page, and its arguments


@environment(packages={"playwright": "browser"}, programs=find_chromium)
class Browser:
    """Environment: do a task on a small web page in Chromium; every action returns a screenshot.

    Actions have the form of Qwen2.5-VL's tool `computer_use`. The reward is 1 if the page's fields are as the
    task says when it ends, otherwise 0. A task ends with the click of a choice or of Submit, or with
    `terminate`. The seed of `reset` sets the page; the column `task` of a row names the task. The pages
    belong to the library: they have no scripts, and no request leaves the process.

    Args:
        tasks: The tasks to draw from, in rows without a `task`.
        size: Width and height of the page in pixels. The model sees the page without resizing if this is a
            multiple of its image token (28 pixels for Qwen2.5-VL) and within its limits of pixels.
        cells: Number of columns and rows of the grid on which the choices of `click_button`, `click_color`
            and `click_shape` lie.
        coordinate_range: Range of coordinates, such as 1000 for Qwen3-VL; 0: pixels of the screenshot, as
            Qwen2.5-VL writes them.
        executable: Path or name of Chromium; by default the first that is on PATH of
            chromium-headless-shell, chromium, chromium-browser and google-chrome.
    """

    def __init__(
        self,
        *,
        tasks: tuple[TaskName, ...] = TASK_NAMES,
        size: Annotated[int, Range(28, 2048)] = 224,
        cells: Annotated[int, Range(2, 16)] = 3,
        coordinate_range: NonNegativeInt = 0,
        executable: str = "",
    ) -> None:
        self.tasks, self.size, self.cells = tasks, size, cells
        self.reach, self.chromium = coordinate_range or size, chromium(executable)
        self.page: Any = None  # opened by the first action
        self.state: Mapping[str, Sequence[str]] = {}
        self.over, self.failure = False, None
        self._close: Callable[[], object] = lambda: None

    def reset(self, seed: int | None = None, task: str | None = None, **columns: Any) -> list:
        """Draw a task and its page; return the goal and a screenshot."""
        if task is not None and task not in TASK_NAMES:
            raise ValueError(f"there is no task {task!r:.40}; there are {', '.join(TASK_NAMES)}")
        name = task or random.Random(seed).choice(self.tasks)
        self.task = make_task(name, seed, self.cells)
        first = self.chromium.run(self.chromium.first(self.task.html, self.size))
        return [{"type": "text", "text": self.task.goal}, as_image(first)]

    def computer_use(
        self,
        action: Action,
        coordinate: list[float] | None = None,
        text: str | None = None,
        keys: list[str] | None = None,
        pixels: float | None = None,
        status: Literal["success", "failure"] | None = None,
    ) -> list:
        """Use a mouse and a keyboard to act on a web page, and take a screenshot.

        Args:
            action: left_click or double_click at a coordinate, type a text, press keys together, scroll the
                page, or terminate the task.
            coordinate: The place [x, y] to click at, from the left and upper edge of the screenshot.
            text: The text to type, for the action type.
            keys: The keys to press together, such as ["ctrl", "a"], for the action key.
            pixels: How far to scroll; positive scrolls up, negative down.
            status: How the task ended, for the action terminate.
        """
        if self.over:
            raise ValueError("the task is over")
        given = {"coordinate": coordinate, "text": text, "keys": keys, "pixels": pixels, "status": status}
        step = as_input(action, {k: v for k, v in given.items() if v is not None}, self.size, self.reach)
        shot = None
        if step:
            try:
                shot = self.chromium.run(self._act(*step))
            except Exception as failure:  # not the model's fault: `get_reward` raises it
                self.failure = failure
                raise
        self.over = shot is None
        return ["The task is over."] if self.over else [as_image(shot)]

    def get_reward(self) -> float:
        """Return 1 if the task was ended with all fields as they should be, else 0; close the page."""
        self.over = True
        self._close()
        if self.failure:
            raise RuntimeError("the browser failed during the task") from self.failure
        return self.task.reward(self.state)

    async def _act(self, method: str, *arguments: Any) -> bytes | None:
        """Perform an input; return the screenshot after it, or None if the task has ended."""
        if self.page is None:
            self.page = await self.chromium.open(self.task.html, self.size)
            # Close the page of an environment that was dropped before its end.
            self._close = weakref.finalize(self, self.chromium.close, self.page)
            self._close.atexit = False
        await attrgetter(method)(self.page)(*arguments)
        self.state = await fields_of(self.page)
        return None if self.state.get(END) else await self.page.screenshot()


def as_input(action: Action, given: Mapping[str, Any], size: int, reach: int) -> Input | None:
    """Convert an action to a method of Playwright's page and its arguments.

    Returns None for `terminate`. Raises ValueError, whose message the model reads, for an invalid action.

    Args:
        action: The action.
        given: Its arguments by name, without those that are None.
        size: Width and height of the page in pixels.
        reach: Coordinates of the right and the lower edge.
    """
    if given.keys() != {TAKES[action]}:
        raise ValueError(f"{action} takes `{TAKES[action]}`, not {', '.join(given) or 'nothing'}")
    match action, given[TAKES[action]]:
        case (("left_click" | "double_click"), place):
            if len(place) != 2 or not all(0 <= at <= reach for at in place):
                raise ValueError(f"`coordinate` must be [x, y] from 0 to {reach}, not {place!r:.40}")
            method = "mouse.click" if action == "left_click" else "mouse.dblclick"
            return method, *(min(at * size / reach, size - 1) for at in place)
        case "type", text:
            if len(text) > MAX_TYPED:
                raise ValueError(f"`text` has {len(text)} characters; the limit is {MAX_TYPED}")
            return "keyboard.insert_text", text
        case "key", keys:
            chord = "+".join(keys).lower()
            if chord not in KEYS:
                raise ValueError(f"there is no key {chord!r:.40}; there are {', '.join(KEYS)}")
            return "keyboard.press", KEYS[chord]
        case "scroll", pixels:
            if abs(pixels) > MAX_SCROLL:
                raise ValueError(f"`pixels` must be at most {MAX_SCROLL}, not {pixels:g}")
            return "evaluate", SCROLL, -pixels
    return None


def as_image(png: bytes) -> dict[str, Any]:
    """Return a screenshot as a content block."""
    from PIL import Image

    return {"type": "image", "image": Image.open(io.BytesIO(png)).convert("RGB")}
