"""EGPO (arXiv 2508.05118): a strict reward of function calls, and a bonus for entropy in the thought.

Title: Exploring Superior Function Calls via Reinforcement Learning
Formula: reward = 1 if calls and arguments match one to one in any order, else 0; A + min(coef H, |A| /
kappa) in the thought.
Our reading: the rules of the match, as in the Berkeley function calling leaderboard, and the bonus, which is
that of arXiv 2506.14758; only the abstract was read.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import advantage, engine, reward
from mmrl.core.answer_text import tagged
from mmrl.core.protocols import Engine
from mmrl.core.reward_table import RewardTable
from mmrl.core.tool_calls import Call, CallError, call_of
from mmrl.core.types import Outcome, Prompt, Rollouts, Trajectory
from mmrl.data.fields import RowError, short
from mmrl.rewards.adapters import OwnAnswer, per_outcome

FENCE = re.compile(r"^\s*```\w*\n(.*?)\n?```\s*$", re.DOTALL)
LONGEST = 20_000  # characters of the calls of an answer: the parsers take time and stack for more


def _own_calls(
    prompt: Prompt, *, tag: str, think: str, allowed: Literal["value", "list"], target: str
) -> OwnAnswer | None:
    """Write the target as an answer; of lists of right values the first one that is not left out."""
    wanted = prompt.columns.get(target) if target else prompt.target
    if wanted is None:
        return None
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    if allowed == "list":
        calls = [{"name": call.name, "arguments": _first(call.arguments)} for call in calls_of(wanted)]
        text = json.dumps(calls)
    thought = f"<{think}></{think}>" if think else ""
    return OwnAnswer((thought + (f"<{tag}>{text}</{tag}>" if tag else text),))


def _first(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Take of each argument the first right value; one that is "" leaves it out."""
    lists = {
        name: values if isinstance(values, list | tuple) else [values] for name, values in arguments.items()
    }
    return {name: values[0] for name, values in lists.items() if values and values[0] != ""}


@reward(own_answer=_own_calls)
@per_outcome
def function_calls(
    prompt: Prompt,
    outcome: Outcome,
    *,
    tag: str = "tool_call",
    think: str = "",
    allowed: Literal["value", "list"] = "value",
    target: str = "",
) -> float | None:
    """Return 1 if the answer calls the right functions with the right arguments, else 0.

    The strict reward of arXiv 2508.05118, of which only the abstract was read; the rules are our reading, as
    in the Berkeley function calling leaderboard. Calls are Python (`f(x=1), g(2)`) or JSON (`{"name": ...,
    "arguments": {...}}`, one, a list, or one in each block); they are parsed, never run, and arguments are
    literals. Calls are matched one to one in any order, arguments by name; numbers are equal as numbers,
    texts up to surrounding space, everything else as it is. No call where none is expected earns 1; what
    cannot be parsed 0. Raises `RowError` for a target that cannot be parsed, None where there is no target.

    Args:
        tag: Blocks of the answer that hold its calls; empty: the whole text.
        think: A tag of which the answer must have a block, such as `think`; empty: none.
        allowed: The arguments of a target are `value`s, or a `list` of the values that are right each; a list
            with "" makes the argument optional.
        target: Column of the data with the target; empty: the prompt's own target.
    """
    wanted = prompt.columns.get(target) if target else prompt.target
    if wanted is None:
        return None
    try:
        expected = calls_of(wanted)
    except CallError as error:
        raise RowError(f"the target of prompt '{prompt.uid}' is no function call: {error}") from error
    text = outcome.text or ""
    if think and not tagged(text, think):
        return 0.0
    text = re.split(f"</{think}>", text, flags=re.IGNORECASE)[-1] if think else text
    blocks = tagged(text, tag) if tag else [text]
    try:
        made = [call for block in blocks for call in calls_of(block)]
    except (CallError, RecursionError):  # lists in lists in lists
        return 0.0
    return float(len(made) == len(expected) and _matched(made, expected, allowed == "list"))


def calls_of(value: Any) -> list[Call]:
    """Read function calls: Python or JSON as a text, or JSON that was parsed; raises `CallError`.

    Arguments without a name are called "0", "1", ... by place.
    """
    match value:
        case str() if len(value) > LONGEST:
            raise CallError(f"it has {len(value)} characters, more than {LONGEST}")
        case str():
            text = fenced[1] if (fenced := FENCE.match(value)) else value.strip()
            return _of_text(text) if text else []
        case {"name": _} | {"function": _}:
            return [call_of(value)]
        case list() | tuple():
            return [call for item in value for call in calls_of(item)]
    raise CallError(f"got {short(value)}")


def _of_text(text: str) -> list[Call]:
    """Parse JSON, one value after another, or a Python expression of calls."""
    if text[0] in "{[":
        try:
            return calls_of(_json(text))
        except CallError:
            if text[0] == "{":
                raise
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CallError(f"{short(text)} is neither JSON nor an expression of Python: {error}") from error
    parts = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return [_call(part) for part in parts]


def _json(text: str) -> Any:
    """Parse one JSON value, or several with nothing but space between them, as a list."""
    decoder, values, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            at += len(text[at:]) - len(text[at:].lstrip())
    except (ValueError, RecursionError) as error:
        raise CallError(f"{short(text)} is no JSON: {error}") from error
    return values[0] if len(values) == 1 else values


def _call(node: ast.expr) -> Call:
    """Read a call from a syntax tree; its function is a name or dotted names, its arguments are literals."""
    if not isinstance(node, ast.Call):
        raise CallError(f"wanted a call, got {short(ast.unparse(node))}")
    names, function = [], node.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise CallError(f"wanted a function by its name, got {short(ast.unparse(node.func))}")
    arguments = {str(i): _literal(value) for i, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise CallError(f"wanted each argument once and by name, got {short(ast.unparse(node))}")
        arguments[keyword.arg] = _literal(keyword.value)
    return Call(".".join([function.id, *reversed(names)]), arguments)


def _literal(node: ast.expr) -> Any:
    """Read a constant, list, tuple, set or dictionary; `literal_eval` takes a tree and runs nothing."""
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise CallError(f"wanted a literal as an argument: {error}") from error


JSON_NAMES = {"true": True, "false": False, "null": None}


# ---- comparing


def _matched(made: Sequence[Call], expected: Sequence[Call], several: bool) -> bool:
    """Whether calls can be paired so that all are equal (a perfect matching, by augmenting paths)."""
    fits = [[_equal_calls(call, right, several) for right in expected] for call in made]
    partner: dict[int, int] = {}  # of every expected call, the one that was made

    def place(i: int, seen: set[int]) -> bool:
        for j, fit in enumerate(fits[i]):
            if fit and j not in seen:
                seen.add(j)
                if j not in partner or place(partner[j], seen):
                    partner[j] = i
                    return True
        return False

    return all(place(i, set()) for i in range(len(made)))


def _equal_calls(made: Call, right: Call, several: bool) -> bool:
    """Compare names and arguments; with `several` every right argument lists the values that are right."""
    if made.name != right.name or not made.arguments.keys() <= right.arguments.keys():
        return False
    for name, wanted in right.arguments.items():
        values = wanted if several and isinstance(wanted, list | tuple) else [wanted]
        if name not in made.arguments:
            if not (several and "" in values):
                return False
        elif not any(_equal(made.arguments[name], value) for value in values):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Compare values: numbers as numbers but not with True or False, texts up to surrounding space."""
    match one, other:
        case bool(), bool():
            return one is other
        case (bool(), _) | (_, bool()):
            return False
        case int() | float(), int() | float():
            return one == other
        case str(), str():
            return one.strip() == other.strip()
        case Mapping(), Mapping():
            return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
        case list() | tuple(), list() | tuple():
            return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and one == other


@engine(scope="vision")
class WithThinkRegion:
    """Note which tokens stand between the tags of a thought, for methods that treat thoughts differently.

    The note `think` is 1 from after the opening tag to before the closing one, else 0. An answer without an
    opening tag has been thinking from its start (the prompt may end with the tag), unless it has no closing
    one either; without a closing tag the thought lasts to the end. It wraps an engine of `vision.tokens`.

    Args:
        open: Opening tag.
        close: Closing tag.
    """

    notes: frozenset[str] = frozenset({"think"})

    def __init__(self, engine: Engine, *, open: str = "<think>", close: str = "</think>") -> None:
        self.engine, self.tags = engine, (open, close)
        self.policy: Any = engine.policy  # of tokens

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry with the wrapped engine, and note its thought."""
        return tuple(self._noted(row) for row in self.engine.rollout(prompts))

    def _noted(self, row: Trajectory) -> Trajectory:
        ids: Tensor = row.steps.ids
        text = self.policy.prompt_encoder.text
        answer = text(ids)
        opened, closed = self._find(answer)
        inside = torch.zeros(len(ids))
        if opened >= 0 or closed >= 0:

            def read(count: int) -> int:
                """Count the characters of the first tokens."""
                return len(text(ids[:count]))

            counts = range(len(ids) + 1)
            # After the token that ends the opening tag; before the one that begins the closing tag.
            first = bisect_left(counts, opened + len(self.tags[0]), key=read) if opened >= 0 else 0
            last = bisect_right(counts, closed, key=read) - 1 if closed >= 0 else len(ids)
            inside[first:last] = 1.0
        return replace(row, notes={**row.notes, **dict.fromkeys(self.notes, inside)})

    def _find(self, answer: str) -> tuple[int, int]:
        """Find the letters at which the tags begin; -1 for a tag that is not there."""
        opened, closed = (answer.find(tag) for tag in self.tags)
        return opened, closed


@engine(scope="vision")
class WithAnswerRegion(WithThinkRegion):
    """Note which tokens stand inside the final answer, for methods that treat it differently (LLDS).

    The note `answer` is 1 from after the last opening tag to before the closing one that follows, else 0;
    without one the answer lasts to the end, and without an opening tag there is none. It wraps an engine of
    `vision.tokens`.

    Args:
        open: Opening tag.
        close: Closing tag.
    """

    notes: frozenset[str] = frozenset({"answer"})

    def __init__(self, engine: Engine, *, open: str = "<answer>", close: str = "</answer>") -> None:
        super().__init__(engine, open=open, close=close)

    def _find(self, answer: str) -> tuple[int, int]:
        opened = answer.rfind(self.tags[0])
        return opened, answer.find(self.tags[1], opened) if opened >= 0 else -1


@advantage(notes={"entropy", "think"})
def strategic_entropy(
    table: RewardTable, *, coef: NonNegativeFloat = 0.4, kappa: PositiveFloat = 2.0
) -> RewardTable:
    """Add the entropy of tokens inside the thought to their advantages, bounded (arXiv 2508.05118).

    A + min(coef H, |A| / kappa), elsewhere A. With kappa above 1 no sign changes, and an advantage of 0 stays
    0. Our reading, since only the abstract is known: the formula and its constants, which are those of arXiv
    2506.14758. The engine `vision.with_think_region` notes where the thought is. Put it last.

    Args:
        coef: Factor of the entropy in nats.
        kappa: The bonus is at most the advantage's size over this.
    """
    table = per_step(table)
    entropy, think = noted(table, "entropy").nan_to_num(), noted(table, "think") == 1
    bonus = torch.minimum(coef * entropy[:, None], table.values.abs() / kappa)
    return table.put(torch.where(think[:, None] & table.valid, table.values + bonus, table.values))
