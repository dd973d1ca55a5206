"""Rewards of the tool calls that a policy wrote: how many, which ones, and at what cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from mmrl.config.binding import Bound
from mmrl.config.ranges import NonNegativeFloat, NonNegativeInt, ShareBelowOne
from mmrl.config.registry import reward as register
from mmrl.config.reward_adapters import (
    OwnAnswer,
    by_rollout,
    policy_messages,
    policy_turns,
    shown,
    tagged,
)
from mmrl.core.answers import words_of
from mmrl.core.tool_calls import Call, CallError, call_of, parse_calls
from mmrl.core.types import Message, Outcome, Prompt
from mmrl.rewards.matching import greedy_pairs, optimal_pairs, transport_plan

CALL = "tool_call"  # tag of a call, whose text is JSON; what other tags hold is any text
ANSWERED = ("call", "stop")  # tag `finish` of a turn whose calls, if any, got replies


def written_calls(turn: Message, tag: str) -> Sequence[Call | CallError]:
    """List the calls of a turn: those that its engine read, or else blocks of the tag."""
    return parse_calls(turn.text, tag) if turn.calls is None or tag != CALL else turn.calls


def calls_in(turn: Message, tag: str = CALL) -> list[Call]:
    """List the well-formed calls of a turn."""
    return [call for call in written_calls(turn, tag) if isinstance(call, Call)]


@register
def tool_calls(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, tag: str = CALL, name: str = ""
) -> list[float]:
    """Count the tool calls of an answer, or of all turns of a conversation, to use as a label.

    A call is what the engine of a conversation read as one, and elsewhere a block
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; one that cannot be read does not count. Give
    it weight 0. With `at: every` and an outcome of every turn each turn has its own calls, which add up to
    those of the conversation.

    Args:
        tag: Tag of a call.
        name: Count calls of this tool alone; empty: all.
    """
    return [
        float(sum(not name or call.name == name for turn in new for call in calls_in(turn, tag)))
        for _, new in policy_messages(outcomes)
    ]


def _own_calls(prompt: Prompt, *, column: str, tag: str, matching: str) -> OwnAnswer | None:
    """Write the reference calls as an answer, with the keys that they have; `soft` gives less than 1."""
    references = reference_calls(prompt, column)
    if not references:
        return None
    texts = [f"<{tag}>{json.dumps(reference)}</{tag}>" for reference in prompt.columns[column]]
    calls = [Call(**reference) for reference in references]
    alike = [[likeness(call, reference) for reference in references] for call in calls]
    full = sum(matched(alike, matching)) / len(references) if matching == "soft" else 1.0
    return OwnAnswer(("\n".join(texts),), full)


@register(own_answer=_own_calls)
def call_match(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    column: str = "calls",
    tag: str = CALL,
    matching: Literal["greedy", "optimal", "soft"] = "greedy",
) -> list[float | None]:
    """Match tool calls with reference calls, one to one (MatchTIR, arXiv 2601.10712).

    The mean over all calls of a turn (`at: every`, with an outcome of every turn), or of a conversation, of
    their likeness: 0 for another tool, else (1 + J + m) / (2 + n), where J is the share of argument names
    that both have, m counts equal arguments and n those of the reference. A call without a partner has 0, so
    does one that cannot be read, and so has an answer without calls. None where the data have no reference
    calls. The calls of all turns of a conversation are matched together, so that a reference pays once.

    Args:
        column: Column with the reference calls: a list of `{"name": ..., "arguments": {...}}`.
        tag: Tag of a call.
        matching: Take the most alike pair again and again (`greedy`, as the code), or the pairs of the
            largest sum (`optimal`, as the paper), or share references out by entropic optimal transport
            (`soft`, regularised by 0.1; as in the code all shares add up to 1, so that n right calls have 1/n
            each).
    """
    calls = [
        [call for turn in new for call in written_calls(turn, tag)] for _, new in policy_messages(outcomes)
    ]
    values: list[float | None] = [None] * len(outcomes)
    for members in by_rollout(outcomes):
        references = reference_calls(prompts[members[0]], column)
        if references is None:
            continue
        whole = [call for i in members for call in calls[i]]
        alike = [[likeness(call, reference) for reference in references] for call in whole]
        earned = iter(matched(alike, matching))
        for i in members:
            values[i] = sum(islice(earned, len(calls[i]))) / max(1, len(calls[i]))
    return values


def matched(alike: Sequence[Sequence[float]], matching: str) -> list[float]:
    """Sum what every call (row) has in common with the references (columns) that it is matched with."""
    if matching == "soft":
        shares = zip(transport_plan(alike), alike, strict=True)
        return [sum(share * value for share, value in zip(*both, strict=True)) for both in shares]
    earned = [0.0] * len(alike)
    for i, j in {"greedy": greedy_pairs, "optimal": optimal_pairs}[matching](alike):
        earned[i] = alike[i][j]
    return earned


def reference_calls(prompt: Prompt, column: str) -> list[dict[str, Any]] | None:
    """Read the reference calls of a prompt, None where it has none. Raises `ValueError` for another form."""
    references = prompt.columns.get(column)
    if not references:
        return references
    calls = []
    for reference in references:
        try:
            calls.append(vars(call_of(reference)))
        except CallError as error:
            raise ValueError(
                f"`call_match` wants calls like {{'name': ..., 'arguments': {{...}}}} in the column "
                f"'{column}', but prompt '{prompt.uid}' has {shown(reference)}"
            ) from error
    return calls


def likeness(call: Call | CallError, reference: Mapping[str, Any]) -> float:
    """Return how alike a call is to a reference call, from 0 to 1; 0 for one that cannot be read."""
    if isinstance(call, CallError) or call.name.lower() != reference["name"].lower():
        return 0.0
    given, wanted = call.arguments, reference.get("arguments", {})
    union = len({*given, *wanted})
    share = len(given.keys() & wanted.keys()) / union if union else 1.0
    equal = sum(name in given and given[name] == value for name, value in wanted.items())
    return (1 + share + equal) / (2 + len(wanted))


def retrievals(outcomes: Sequence[Outcome], tag: str) -> list[tuple[list[str], list[str]]]:
    """List the retrievals of a policy up to every outcome, in the two parts of `policy_messages`.

    A retrieval is a block that holds a text, or, with the tag `tool_call`, a call that `vision.with_tools`
    can read. Those of a turn that ended its conversation at a limit or a fault got no answer: they are none.
    """

    def queries(turns: Sequence[Message]) -> list[str]:
        if tag == CALL:
            calls = [call for turn in turns for call in calls_in(turn)]
            return [json.dumps([call.name, call.arguments], sort_keys=True) for call in calls]
        return [block.strip() for turn in turns for block in tagged(turn.text, tag) if block.strip()]

    return [
        (queries(before), queries(new if outcome.tags.get("finish", "stop") in ANSWERED else new[:-1]))
        for outcome, (before, new) in zip(outcomes, policy_messages(outcomes), strict=True)
    ]


@register
def retrieval_bonus(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    tag: str = CALL,
    first: NonNegativeFloat = 0.5,
    decay: ShareBelowOne = 0.5,
) -> list[float]:
    """Pay for retrievals, each less than the one before: first (1 - decay^n) / (1 - decay).

    For GraphRAG-R1 (arXiv 2507.23581), whose formula was not found: our reading. n counts different
    retrievals that were answered in the conversation, so copies of a query earn nothing; with the defaults it
    stays below 1. With `at: every` a turn has what its retrievals add.

    Args:
        tag: Tag of a retrieval, such as `tool_call` or `search`.
        first: Reward of the first retrieval.
        decay: Factor from each to the next.
    """

    def paid(queries: Sequence[str]) -> float:
        return first * (1 - decay ** len(set(queries))) / (1 - decay)

    return [paid([*before, *new]) - paid(before) for before, new in retrievals(outcomes, tag)]


@register
def cost_aware(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Outcome],
    *,
    reward: Callable[[], Bound],
    tag: str = CALL,
    rate: NonNegativeFloat = 0.1,
    free: NonNegativeInt = 0,
) -> list[float | None]:
    """Discount another reward by exp(-rate n) for n retrievals (GraphRAG-R1's cost-aware F1).

    arXiv 2507.23581, whose formula was not found: our reading. All retrievals of the conversation so far that
    were answered count, repeated ones too.

    Args:
        reward: What is discounted.
        tag: Tag of a retrieval.
        rate: Cost of a retrieval.
        free: Retrievals that cost nothing.
    """
    values = reward()(prompts, outcomes)
    counts = [len(before) + len(new) for before, new in retrievals(outcomes, tag)]
    return [
        None if value is None else value * math.exp(-rate * max(0, count - free))
        for value, count in zip(values, counts, strict=True)
    ]


@register
def entity_match(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, column: str = "entities", tag: str = ""
) -> list[float | None]:
    """Return the share of the known entities that a policy names (E-GRPO, arXiv 2510.24694).

    For the label that `partial_credit` reads. All turns of a conversation count, and an entity once; with
    `at: every` a turn has what it names first. Case, articles and punctuation do not matter: our reading
    of an exact match of strings. None where the data list no entities.

    Args:
        column: Column with the list of entities.
        tag: Blocks that are searched, such as `think`; empty: the whole text.
    """

    def words(text: str) -> str:
        return f" {' '.join(words_of(text))} "

    def named(entity: str, texts: Sequence[str]) -> bool:
        return any(entity in words(" ".join(tagged(text, tag)) if tag else text) for text in texts)

    values: list[float | None] = []
    for prompt, (before, new) in zip(prompts, policy_turns(outcomes), strict=True):
        entities = [words(str(name)) for name in prompt.columns.get(column) or ()]
        found = sum(named(entity, new) and not named(entity, before) for entity in entities)
        values.append(found / len(entities) if entities else None)
    return values
