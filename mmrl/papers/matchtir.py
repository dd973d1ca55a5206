"""MatchTIR (arXiv 2601.10712): a turn earns the agreement of its calls with reference calls.

Title: MatchTIR: Fine-Grained Supervision for Tool-Integrated Reasoning via Bipartite Matching
Formula: r = mean over calls of (1 + J + m) / (2 + n) with the matched reference: J the share of argument
names in common, m equal arguments of n.
Our reading: calls of the whole conversation are matched together, so that a reference pays once.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from mmrl.config.registry import reward
from mmrl.core.tool_calls import Call, CallError, call_of
from mmrl.core.types import Outcome, Prompt
from mmrl.rewards.adapters import OwnAnswer, by_rollout, policy_messages
from mmrl.rewards.tool_calls import CALL, written_calls
from mmrl.runtime.scoring import shown

Pairs = list[tuple[int, int]]


def greedy_pairs(scores: Sequence[Sequence[float]]) -> Pairs:
    """Pair rows with columns one to one: the best pair left, again and again; a score of 0 is none."""
    ordered = sorted(
        ((i, j) for i, row in enumerate(scores) for j, score in enumerate(row) if score > 0),
        key=lambda pair: -scores[pair[0]][pair[1]],
    )
    pairs, rows, columns = [], set(), set()
    for i, j in ordered:
        if i not in rows and j not in columns:
            pairs.append((i, j))
            rows.add(i)
            columns.add(j)
    return pairs


def optimal_pairs(scores: Sequence[Sequence[float]]) -> Pairs:
    """Pair rows with columns one to one so that the sum of scores is largest (Kuhn-Munkres, cubic time)."""
    count, width = len(scores), len(scores[0]) if scores else 0
    if count > width:
        return [(i, j) for j, i in optimal_pairs(list(zip(*scores, strict=True)))]
    # The cost of a pair is minus its score. Potentials keep cost >= of_row + of_column, equal for pairs.
    # Rows and columns count from 1: column 0 holds the row that is being added, row 0 is none.
    of_row, of_column, row_at = [0.0] * (count + 1), [0.0] * (width + 1), [0] * (width + 1)
    for row in range(1, count + 1):
        row_at[0], column = row, 0
        slack, came_from, seen = [math.inf] * (width + 1), [0] * (width + 1), [False] * (width + 1)
        while row_at[column]:  # the cheapest path that changes pairs, as Dijkstra finds it, to a free column
            seen[column], here, step, nearest = True, row_at[column], math.inf, 0
            for j in range(1, width + 1):
                if seen[j]:
                    continue
                reduced = -scores[here - 1][j - 1] - of_row[here] - of_column[j]
                if reduced < slack[j]:
                    slack[j], came_from[j] = reduced, column
                if slack[j] < step:
                    step, nearest = slack[j], j
            for j in range(width + 1):
                if seen[j]:
                    of_row[row_at[j]] += step
                    of_column[j] -= step
                else:
                    slack[j] -= step
            column = nearest
        while column:
            row_at[column], column = row_at[came_from[column]], came_from[column]
    return [(row_at[j] - 1, j - 1) for j in range(1, width + 1) if row_at[j]]


def transport_plan(
    scores: Sequence[Sequence[float]], reg: float = 0.1, tol: float = 1e-9, max_iters: int = 1000
) -> list[list[float]]:
    """Compute shares of all pairs, 1 together, by entropic optimal transport of the cost -score (Sinkhorn).

    Every row has the same share of the whole, and so has every column. `reg` is the weight of the entropy:
    the smaller, the closer to one-to-one. The iteration ends once no factor changes by more than `tol`,
    or after `max_iters`.
    """
    count, width = len(scores), len(scores[0]) if scores else 0
    if not count or not width:
        return [[] for _ in scores]
    # Divided by the largest number of a row, which the factor of the row takes up, so that nothing overflows.
    kernel = [[math.exp((score - max(row)) / reg) for score in row] for row in scores]
    by_row, by_column = [1.0] * count, [1.0] * width
    for _ in range(max_iters):
        by_row = [1 / count / sum(map(operator.mul, row, by_column)) for row in kernel]
        columns = [sum(map(operator.mul, column, by_row)) for column in zip(*kernel, strict=True)]
        found = [1 / width / total for total in columns]
        changed = max(abs(new / old - 1) for new, old in zip(found, by_column, strict=True))
        by_column = found
        if changed < tol:
            break
    return [
        [u * value * v for value, v in zip(row, by_column, strict=True)]
        for u, row in zip(by_row, kernel, strict=True)
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


@reward(own_answer=_own_calls)
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
    """Sum the agreement of every call (row) with its matched references (columns)."""
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
