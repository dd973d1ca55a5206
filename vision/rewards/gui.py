"""Rewards for actions on screens: the type of an action, and the position of a click."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import reward
from mmrl.core.answer_text import tagged
from mmrl.core.types import Outcome, Prompt
from mmrl.data.fields import is_number
from mmrl.rewards.adapters import OwnAnswer, per_outcome
from mmrl.vision.benchmarks.boxes import Box, Boxes, decimal, is_box, parse_point

Point = tuple[float, ...]
LONGEST = 4000  # longest action that is parsed, in characters
# Tolerance for rounding errors: 0.34 - 0.2 is 0.14000000000000001 as a float.
ROUNDING = 1e-9


def own_action(prompt: Prompt, *, tag: str, of: Literal["sum", "type", "value"] = "type") -> OwnAnswer | None:
    """Format the target action as an answer. The best `sum` of a click is 2; only clicks have a `value`."""
    target = action_of(prompt)
    click = type_of(target) == "click"
    full = {"sum": 1.0 + click, "type": 1.0, "value": float(click)}[of]
    return OwnAnswer((f"<{tag}>{json.dumps(target)}</{tag}>",), full) if full else None


def _own_click(prompt: Prompt) -> OwnAnswer | None:
    """Format the centre of each target box as an answer."""
    match prompt.target:
        case Boxes(boxes=boxes) as target if boxes:
            middles = [target.in_answers(((a + c) / 2, (b + d) / 2) * 2) for a, b, c, d in boxes]
            return OwnAnswer(tuple(f"[{decimal(x)}, {decimal(y)}]" for x, y, _, _ in middles))
    return None


@reward(own_answer=own_action)
@per_outcome
def click_reward(
    prompt: Prompt,
    outcome: Outcome,
    *,
    of: Literal["sum", "type", "value"] = "sum",
    threshold: PositiveFloat = 0.14,
    tag: str = "action",
) -> float:
    """Reward a screen action: 1 for the right type, 1 for the right position (TON, arXiv 2505.16854).

    Answer and target are dictionaries in JSON or Python syntax with the keys `action` and `position`, [x, y]
    in fractions of the screen size. The answer is read from its last `tag` block. The type is right if both
    actions have the same name, ignoring case. The position is right if both are clicks at most `threshold`
    apart; other actions get 0 for the position, as in the paper's code. An answer that cannot be parsed gets
    0. Our reading: Python syntax is parsed as a literal, while the paper's code evaluates it.

    Args:
        of: `sum` of both rewards, or only one: `type`, or `value` for the position.
        threshold: Largest Euclidean distance of two matching clicks, in fractions of the screen size.
        tag: Name of the answer block's tag.
    """
    answered, target = parse_action(outcome.text or "", tag), action_of(prompt)
    if answered is None:
        return 0.0
    same = type_of(answered) == type_of(target)
    value = (
        same and type_of(target) == "click" and is_near(position_of(answered), position_of(target), threshold)
    )
    return {"sum": float(same + value), "type": float(same), "value": float(value)}[of]


@reward(own_answer=_own_click)
@per_outcome
def click_inside(prompt: Prompt, outcome: Outcome) -> float | None:
    """Reward a click inside a target box with 1, else 0, as in ScreenSpot.

    The click is the first point of the answer, or the centre of its first box. The reward is None if the
    target is not `Boxes`. The data set `vision.boxes` provides prompts with target boxes.
    """
    click, boxes = _click(prompt, outcome)
    return None if boxes is None else float(click is not None and any(is_inside(click, box) for box in boxes))


@reward(own_answer=_own_click)
@per_outcome
def click_proximity(prompt: Prompt, outcome: Outcome, *, sigma: PositiveFloat = 1.0) -> float | None:
    """Measure how near a click is to the centre of the target box, in [0, 1] (SSL, arXiv 2601.22491).

    The reward is exp(-(dx / sx)^2 / 2 - (dy / sy)^2 / 2), where sx and sy are `sigma` times half the width
    and height of the box (our reading). The click is parsed as in `click_inside`; an answer without a click
    gets 0. The nearest of several target boxes counts. The reward is None if the target is not `Boxes`.
    Use it with `weight: 0`, as a label that `tiers` reads.
    """
    click, boxes = _click(prompt, outcome)
    if click is None or not boxes:
        return None if boxes is None else 0.0
    distances = []
    for left, top, right, bottom in boxes:
        dx = (click[0] - (left + right) / 2) / (sigma * (right - left) / 2)
        dy = (click[1] - (top + bottom) / 2) / (sigma * (bottom - top) / 2)
        distances.append(dx * dx + dy * dy)
    return math.exp(-min(distances) / 2)


def _click(prompt: Prompt, outcome: Outcome) -> tuple[tuple[float, float] | None, tuple[Box, ...] | None]:
    """Return the click of an answer in pixels of the image, and the target boxes; each is None if missing."""
    match prompt.target:
        case Boxes(boxes=boxes, unit=(across, down)):
            point = parse_point(outcome.text or "")
            return point and (point[0] * across, point[1] * down), boxes
    return None, None


# ---- parsers of actions


def parse_action(text: str, tag: str = "action") -> Mapping[str, Any] | None:
    """Parse the action in the last block of a tag: a dictionary in JSON or as a Python literal.

    Returns None without a valid action; a valid action has a string under the key `action`.
    """
    blocks = tagged(text, tag)
    return _parsed(blocks[-1]) if blocks else None


def _parsed(text: str) -> Mapping[str, Any] | None:
    text = text.strip()
    if len(text) > LONGEST:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            action = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        match action:
            case {"action": str()}:
                return action
    return None


def action_of(prompt: Prompt) -> Mapping[str, Any]:
    """Return the target action of a prompt. The target is a dictionary, or a text with or without tags."""
    match prompt.target:
        case {"action": str()} as action:
            return action
        case str() as text:
            action = parse_action(text) or _parsed(text)
            if action is not None:
                return action
    raise ValueError(
        f"prompt '{prompt.uid}': wanted as its answer an action such as "
        f'{{"action": "click", "position": [0.5, 0.3]}}, got {prompt.target!r}'
    )


def type_of(action: Mapping[str, Any]) -> str:
    """Return the type of an action in lower case."""
    return action["action"].strip().lower()


def _numbers(value: Any, count: int) -> Point | None:
    """Parse a list of `count` finite numbers, or its JSON text; None if the value is invalid."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    match value:
        case [*numbers] if len(numbers) == count and all(map(is_number, numbers)):
            return tuple(map(float, numbers))
    return None


def position_of(action: Mapping[str, Any]) -> Point | None:
    """Return the position (x, y) of an action; None without a valid position."""
    return _numbers(action.get("position"), 2)


def box_of(action: Mapping[str, Any]) -> Any:
    """Return the box (x0, y0, x1, y1) of an action; None without a valid box."""
    box = _numbers(action.get("bbox"), 4)
    return box if box and is_box(box) else None


def is_near(point: Point | None, other: Point | None, threshold: float) -> bool:
    """Whether both points exist and are at most `threshold` apart."""
    return point is not None and other is not None and math.dist(point, other) <= threshold + ROUNDING


def is_inside(point: Point, box: Point) -> bool:
    """Whether a point is inside a box or on its edge."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
