"""EGPO (arXiv 2508.05118): a strict reward for function calls, and an entropy bonus inside the thought.

Title: Exploring Superior Function Calls via Reinforcement Learning
Formula: reward = 1 if calls match one to one, else 0; A + min(coef H, |A| / kappa) in the thought.
Our reading: match as in the Berkeley leaderboard, bonus of arXiv 2506.14758; only the abstract was read.
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
LONGEST = 20_000  # characters of calls that are parsed: longer texts cost time and stack
JSON_NAMES = {"true": True, "false": False, "null": None}


def _own_calls(
    prompt: Prompt, *, tag: str, think: str, allowed: Literal["value", "list"], target: str
) -> OwnAnswer | None:
    """Write the target as an answer; of lists of right values take the first, and leave "" out."""
    wanted = prompt.columns.get(target) if target else prompt.target
    if wanted is None:
        return None
    text = wanted if isinstance(wanted, str) else json.dumps(wanted)
    if allowed == "list":
        calls = []
        for call in calls_of(wanted):
            lists = {k: v if isinstance(v, list | tuple) else [v] for k, v in call.arguments.items()}
            first = {name: values[0] for name, values in lists.items() if values and values[0] != ""}
            calls.append({"name": call.name, "arguments": first})
        text = json.dumps(calls)
    thought = f"<{think}></{think}>" if think else ""
    return OwnAnswer((thought + (f"<{tag}>{text}</{tag}>" if tag else text),))


@reward(own_answer=_own_calls)
@per_outcome
def function_calls(
    prompt: Prompt, outcome: Outcome, *, tag: str = "tool_call", think: str = "",
    allowed: Literal["value", "list"] = "value", target: str = "",
) -> float | None:  # fmt: skip
    """Return 1 if the answer calls the right functions with the right arguments, else 0.

    The strict reward of arXiv 2508.05118; our reading, since only the abstract was read: the rules of the
    Berkeley function calling leaderboard. Calls are Python (`f(x=1), g(2)`) or JSON (`{"name": ...,
    "arguments": {...}}`: one, a list, or one per block). They are parsed, never run; arguments are literals.
    Calls match one to one in any order, arguments by name, numbers by value, and texts without surrounding
    space. No call earns 1 if none is expected; an answer that cannot be parsed earns 0. None without a
    target; a target that cannot be parsed raises `RowError`.

    Args:
        tag: Tag around the calls of an answer; empty: the whole text is calls.
        think: Tag of a block that the answer must have before its calls, such as `think`; empty: none.
        allowed: Each argument of a target is the right `value`, or a `list` of right values, in which ""
            makes the argument optional.
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
        calls = [call for block in blocks for call in calls_of(block)]
    except (CallError, RecursionError):  # deeply nested lists
        return 0.0
    return float(len(calls) == len(expected) and _matched(calls, expected, allowed == "list"))


def calls_of(value: Any) -> list[Call]:
    """Parse function calls from Python or JSON text, or from parsed JSON; raises `CallError`.

    Positional arguments get the names "0", "1", ...
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
    """Parse a sequence of JSON values, or a Python expression of calls."""
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
    """Parse JSON values separated by space: one as itself, several as a list."""
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
    """Convert a syntax tree to a call: a (dotted) name with literal arguments."""
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
    """Evaluate a constant, list, tuple, set or dictionary; `literal_eval` runs no code."""
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise CallError(f"wanted a literal as an argument: {error}") from error


def _matched(calls: Sequence[Call], expected: Sequence[Call], several: bool) -> bool:
    """Whether calls pair up with equal expected calls (a perfect matching, by augmenting paths)."""
    fits = [[_equal_calls(call, right, several) for right in expected] for call in calls]
    partner: dict[int, int] = {}  # index of the call matched to each expected one

    def place(i: int, seen: set[int]) -> bool:
        for j, fit in enumerate(fits[i]):
            if fit and j not in seen:
                seen.add(j)
                if j not in partner or place(partner[j], seen):
                    partner[j] = i
                    return True
        return False

    return all(place(i, set()) for i in range(len(calls)))


def _equal_calls(call: Call, right: Call, several: bool) -> bool:
    """Compare names and arguments; with `several` each argument of `right` is a list of right values."""
    if call.name != right.name or not call.arguments.keys() <= right.arguments.keys():
        return False
    for name, wanted in right.arguments.items():
        values = wanted if several and isinstance(wanted, list | tuple) else [wanted]
        if name not in call.arguments:
            if not (several and "" in values):
                return False
        elif not any(_equal(call.arguments[name], value) for value in values):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Compare values: numbers by value, booleans only with booleans, texts without surrounding space."""
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
    """Mark the tokens inside the thought of each answer, as the note `think` (1 inside, else 0).

    The region excludes the tags. Without an opening tag it starts with the answer, because the prompt may
    end with the tag; without a closing tag it lasts to the end; without both there is none. Wraps an engine
    of `vision.tokens`.

    Args:
        open: Opening tag.
        close: Closing tag.
    """

    notes: frozenset[str] = frozenset({"think"})

    def __init__(self, engine: Engine, *, open: str = "<think>", close: str = "</think>") -> None:
        self.engine, self.tags = engine, (open, close)
        self.policy: Any = engine.policy  # of tokens

    def rollout(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Answer every entry with the wrapped engine, and mark its region."""
        return tuple(self._noted(row) for row in self.engine.rollout(prompts))

    def _noted(self, row: Trajectory) -> Trajectory:
        ids, text = row.steps.ids, self.policy.prompt_encoder.text
        opened, closed = self._find(text(ids))
        inside = torch.zeros(len(ids))
        if opened >= 0 or closed >= 0:
            counts = range(len(ids) + 1)
            letters = lambda count: len(text(ids[:count]))  # of the first tokens
            # After the token that ends the opening tag; before the one that begins the closing tag.
            first = bisect_left(counts, opened + len(self.tags[0]), key=letters) if opened >= 0 else 0
            last = bisect_right(counts, closed, key=letters) - 1 if closed >= 0 else len(ids)
            inside[first:last] = 1.0
        return replace(row, notes={**row.notes, **dict.fromkeys(self.notes, inside)})

    def _find(self, answer: str) -> tuple[int, int]:
        """Find where the tags begin in an answer; -1 for an absent tag."""
        return answer.find(self.tags[0]), answer.find(self.tags[1])


@engine(scope="vision")
class WithAnswerRegion(WithThinkRegion):
    """Mark the tokens inside the final answer, as the note `answer` (1 inside, else 0), for LLDS.

    The region starts after the last opening tag, and ends before the closing tag after it or with the text;
    without an opening tag there is none. Wraps an engine of `vision.tokens`.

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

    A + min(coef H, |A| / kappa) in the thought, A elsewhere. With kappa above 1 no sign changes, and an
    advantage of 0 stays 0. Our reading, since only the abstract is known: formula and constants are those of
    arXiv 2506.14758. The engine `vision.with_think_region` marks the thought. Put this piece last.

    Args:
        coef: Factor of the entropy in nats.
        kappa: The bonus is at most |A| / kappa.
    """
    table = per_step(table)
    entropy, think = noted(table, "entropy").nan_to_num(), noted(table, "think") == 1
    bonus = torch.minimum(coef * entropy[:, None], table.values.abs() / kappa)
    return table.put(torch.where(think[:, None] & table.valid, table.values + bonus, table.values))
