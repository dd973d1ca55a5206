"""Rewards of the tool calls in the text of an answer: how many, which ones, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any, Literal

from mmrl.config.binding import Bound
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, ShareBelowOne
from mmrl.config.registry import reward as register
from mmrl.config.reward_adapters import conversation_texts, per_outcome, shown, tagged
from mmrl.core.tool_calls import Call, parse_calls
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.text import normal_words

SMALL = 8  # calls that are assigned by trying all orders


def calls_in(text: str, tag: str = "tool_call") -> list[Mapping[str, Any]]:
    """List the well-formed calls in a text, as `vision.with_tools` reads them."""
    calls = []
    for call in parse_calls(text, tag):
        match call:
            case Call(name=name, arguments=arguments):
                calls.append({"name": name, "arguments": arguments})
    return calls


@register
@per_outcome
def tool_calls(prompt: Prompt, outcome: Outcome, *, tag: str = "tool_call", name: str = "") -> float:
    """Count the tool calls in the text of an answer, to use as a label.

    A call is a block `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; what is no such JSON does
    not count. Give it weight 0; with `at: every` a conversation has the sum over its turns.

    Args:
        tag: Tag of a call.
        name: Count calls of this tool alone; empty: all.
    """
    calls = calls_in(outcome.text or "", tag)
    return float(sum(not name or call["name"] == name for call in calls))


@register
@per_outcome
def call_match(
    prompt: Prompt,
    outcome: Outcome,
    *,
    column: str = "calls",
    tag: str = "tool_call",
    matching: Literal["greedy", "optimal"] = "greedy",
) -> float | None:
    """Match the tool calls of an answer with reference calls, one to one (MatchTIR, arXiv 2601.10712).

    The mean over the answer's calls of their likeness: 0 for another tool, else (1 + J + m) / (2 + n), where
    J is the share of argument names that both have, m counts equal arguments and n those of the reference. A
    call without a partner has 0, and so has an answer without calls. None where the data have no reference
    calls. Our reading: calls are matched within one outcome, so with `at: every` a call that comes again in a
    later turn is paid again.

    Args:
        column: Column with the reference calls: a list of `{"name": ..., "arguments": {...}}`.
        tag: Tag of a call.
        matching: Take the most alike pair again and again (`greedy`, as the code), or the pairs of the
            largest sum (`optimal`, as the paper, for up to 8 calls).
    """
    references = prompt.columns.get(column)
    if references is None:
        return None
    calls = calls_in(outcome.text or "", tag)
    for reference in references:
        match reference:
            case {"name": str()} if isinstance(reference.get("arguments", {}), Mapping):
                continue
        raise ValueError(
            f"`call_match` wants calls like {{'name': ..., 'arguments': {{...}}}} in the column '{column}', "
            f"but prompt '{prompt.uid}' has {shown(reference)}"
        )
    if not calls:
        return 0.0
    alike = [[likeness(call, reference) for reference in references] for call in calls]
    return sum(matched(alike, matching)) / len(calls)


def likeness(call: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Return how alike a call is to a reference call, from 0 to 1."""
    if call["name"].lower() != reference["name"].lower():
        return 0.0
    given, wanted = call["arguments"], reference.get("arguments", {})
    union = len({*given, *wanted})
    share = len(given.keys() & wanted.keys()) / union if union else 1.0
    equal = sum(name in given and given[name] == value for name, value in wanted.items())
    return (1 + share + equal) / (2 + len(wanted))


def matched(alike: Sequence[Sequence[float]], matching: str) -> list[float]:
    """Assign calls to references one to one, and return the likeness of every call; 0 without a partner.

    Raises `ValueError` for an optimal assignment of too many calls.
    """
    rows, columns = len(alike), len(alike[0]) if alike else 0
    if matching == "optimal":
        if min(rows, columns) > SMALL:
            raise ValueError(
                f"`matching: optimal` tries all orders of up to {SMALL} calls, not of {rows} calls and "
                f"{columns} references; use `greedy`"
            )
        # The shorter side is assigned to places of the longer one, in every order.
        few, many = (rows, columns) if rows <= columns else (columns, rows)

        def pairs(order: Sequence[int]) -> list[tuple[int, int]]:
            return [(i, j) if rows <= columns else (j, i) for i, j in enumerate(order)]

        best = max(
            permutations(range(many), few), key=lambda order: sum(alike[i][j] for i, j in pairs(order))
        )
        chosen = pairs(best)
    else:
        ordered = sorted(
            ((i, j) for i in range(rows) for j in range(columns) if alike[i][j] > 0),
            key=lambda pair: -alike[pair[0]][pair[1]],
        )
        chosen, rows_left, columns_left = [], set(range(rows)), set(range(columns))
        for i, j in ordered:
            if i in rows_left and j in columns_left:
                chosen.append((i, j))
                rows_left.remove(i)
                columns_left.remove(j)
    found = dict(chosen)
    return [alike[i][found[i]] if i in found else 0.0 for i in range(rows)]


@register
def retrieval_bonus(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    tag: str = "tool_call",
    first: NonNegativeFloat = 0.5,
    decay: ShareBelowOne = 0.5,
) -> list[float]:
    """Pay for retrievals, each less than the one before: first (1 - decay^n) / (1 - decay).

    For GraphRAG-R1 (arXiv 2507.23581), whose formula was not found: our reading. n counts different blocks of
    the conversation so far, so copies of a query earn nothing; with the defaults it stays below 1.

    Args:
        tag: Tag of a retrieval, such as `tool_call` or `search`.
        first: Reward of the first retrieval.
        decay: Factor from each to the next.
    """
    queries = [{block.strip() for block in tagged(text, tag)} - {""} for text in conversation_texts(outcomes)]
    return [first * (1 - decay ** len(different)) / (1 - decay) for different in queries]


@register
def cost_aware(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    reward: Callable[[], Bound],
    tag: str = "tool_call",
    rate: NonNegativeFloat = 0.1,
    free: NonNegativeInt = 0,
) -> list[float | None]:
    """Discount another reward by exp(-rate n) for n retrievals (GraphRAG-R1's cost-aware F1).

    arXiv 2507.23581, whose formula was not found: our reading. All retrievals of the conversation so far
    count, repeated ones too.

    Args:
        reward: What is discounted.
        tag: Tag of a retrieval.
        rate: Cost of a retrieval.
        free: Retrievals that cost nothing.
    """
    values = reward()(prompts, outcomes)
    counts = [sum(bool(b.strip()) for b in tagged(text, tag)) for text in conversation_texts(outcomes)]
    return [
        None if value is None else value * math.exp(-rate * max(0, count - free))
        for value, count in zip(values, counts, strict=True)
    ]


@register
@per_outcome
def entity_match(
    prompt: Prompt, outcome: Outcome, *, column: str = "entities", tag: str = ""
) -> float | None:
    """Return the share of the known entities that a text names (E-GRPO, arXiv 2510.24694).

    For the label that `partial_credit` reads. Case, articles and punctuation do not matter: our reading of an
    exact match of strings. None where the data list no entities.

    Args:
        column: Column with the list of entities.
        tag: Blocks that are searched, such as `think`; empty: the whole text.
    """
    entities = prompt.columns.get(column)
    if not entities:
        return None
    text = outcome.text or ""
    words = f" {' '.join(normal_words(' '.join(tagged(text, tag)) if tag else text))} "
    return sum(f" {' '.join(normal_words(str(name)))} " in words for name in entities) / len(entities)


@register
@per_outcome
def early_answer(
    prompt: Prompt, outcome: Outcome, *, budget: PositiveInt = 4, coef: NonNegativeFloat = 0.1
) -> float:
    """Reward an answer for the turns that it did not need: coef (budget - t) / budget (SLATE).

    arXiv 2602.23440; t is the number of the turn that answers, from 1, where its tag `turn` counts from 0. It
    is 0 beyond the budget.

    Args:
        budget: Turns that an answer may take (the paper: 4).
        coef: Largest reward.
    """
    turn = int(outcome.tags.get("turn", "0")) + 1
    return coef * max(0, budget - turn) / budget
