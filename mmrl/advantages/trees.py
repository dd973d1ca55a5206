"""Advantage functions for answers that part from each other in a tree."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable, name_id

Node = tuple[int, ...]  # the group, and the numbers of the parts that lead to it


@advantage(notes={"node"})
def tree_values(
    table: RewardTable, *, scale: Literal["none", "siblings"] = "none", eps: NonNegativeFloat = 1e-8
) -> RewardTable:
    """Credit each part of a tree of answers with what it adds to the value (SPO, arXiv 2505.23564).

    The value of a leaf is the reward of its answer, that of another part the mean of its continuations'. A
    part has its value less that of the part before it; the first parts have theirs less the mean of the
    group. Tokens that rows share are learned from in the first of these rows alone, and parts with an
    advantage of 0 not at all. `vision.with_branches`, and `vision.with_turn_branches` for conversations, note
    the `node` of every token; a row without it is a part of its own (our reading). Put it after `total`.

    Args:
        scale: Divide by nothing, or by the deviation (over their number) of the values of all continuations
            of the part before (`siblings`).
        eps: Added to that deviation.
    """
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    reward, known = table.values.gather(2, last)[..., 0], table.valid.gather(2, last)[..., 0]  # (N, R)
    steps = per_step(table)
    number = torch.where(steps.present, noted(steps, "node"), torch.nan)  # (N, T)
    paths = [
        _path(int(group), row, i) for i, (group, row) in enumerate(zip(table.group, number, strict=True))
    ]
    credit, valid = torch.zeros_like(steps.values), torch.zeros_like(steps.valid)
    for column in range(len(table.names)):
        edges = _edges(paths, reward[:, column].tolist(), known[:, column].tolist(), scale, eps)
        for i, path in enumerate(paths):
            for node, inside in _parts(path, number[i]):
                if node in edges:
                    part = inside & steps.present[i]
                    credit[i, column, part], valid[i, column, part] = edges[node], True
    learn, seen = steps.learn & (credit != 0).any(1), set()
    for i, path in enumerate(paths):
        for node, inside in _parts(path, number[i]):
            if node in seen:
                learn[i] &= ~inside
            seen.add(node)
    return steps.replace(values=credit, valid=valid, learn=learn)


@advantage(notes={"node", "token"})
def branch_pairs(table: RewardTable, *, threshold: float = 0.5) -> RewardTable:
    """Prefer branches of a tree that lead to a right answer to siblings that lead to none (TreeCUA-DPO).

    arXiv 2602.09662, of which only the abstract was read; our reading. Where a tree parts, a branch whose
    best answer is right is chosen and a sibling without a right answer rejected: 1 and -1 on the tokens of
    the two branches alone, in a group of their own; all else is dropped. Siblings of the same tokens are one
    branch. A row takes part in one pair at most, and each parting makes one, those nearest to the ends first.
    `vision.with_turn_branches`, and `vision.with_branches` for answers, note the `node` of every token. Put
    it after `total`, before an objective of pairs.

    Args:
        threshold: An answer is right above this reward.
    """
    last = table.last.clamp(min=0)[:, None]
    known = table.valid[:, 0].gather(1, last)[:, 0].tolist()
    right = (table.values[:, 0].gather(1, last)[:, 0] > threshold).tolist()
    steps = per_step(table)
    number, token = (torch.where(steps.present, noted(steps, name), torch.nan) for name in ("node", "token"))
    branches: dict[Node, dict[tuple[float, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    inside: dict[tuple[Node, int], Tensor] = {}  # the steps of the branch that follows a part, in a row
    for i, group in enumerate(table.group.tolist()):
        for node, part in _parts(_path(group, number[i], i), number[i]) if known[i] else ():
            inside[node[:-1], i] = part & steps.present[i]
            branches[node[:-1]][tuple(token[i, inside[node[:-1], i]].tolist())].append(i)
    pair = torch.zeros(steps.present.shape, dtype=torch.float64)
    groups, used = steps.ids["group"].clone(), set[int]()
    for node in sorted(branches, key=len, reverse=True):
        listed = branches[node].values()
        chosen = [i for rows in listed for i in rows if right[i]]
        rejected = [i for rows in listed if not any(right[i] for i in rows) for i in rows]
        free = [[i for i in rows if i not in used] for rows in (chosen, rejected)]
        if all(free):
            for sign, (i, *_) in zip((1.0, -1.0), free, strict=True):
                pair[i, inside[node, i]] = sign
                groups[i] = name_id(f"{node[0]}/{free[0][0]}")
                used.add(i)
    return steps.replace(
        values=pair[:, None].expand_as(steps.values),
        ids={**steps.ids, "group": groups},
        learn=steps.learn & (pair != 0),
    )


def _path(group: int, number: Tensor, row: int) -> Node:
    """Return the leaf of a row: its group and the numbers of its parts in order."""
    numbers = number[~number.isnan()].long()
    if not len(numbers):
        return (group, -1 - row)
    return (group, *torch.unique_consecutive(numbers).tolist())


def _parts(path: Node, number: Tensor) -> list[tuple[Node, Tensor]]:
    """List the parts of a row with their steps: (T,) bool each."""
    if path[1] < 0:
        return [(path, torch.ones_like(number, dtype=torch.bool))]
    return [(path[: depth + 1], number == path[depth]) for depth in range(1, len(path))]


def _edges(
    paths: list[Node], reward: list[float], known: list[bool], scale: str, eps: float
) -> dict[Node, float]:
    """Compute the advantage of every part that leads to a leaf with a reward."""
    below: dict[Node, list[float]] = defaultdict(list)  # values of the continuations of a part
    for path, value, applies in zip(paths, reward, known, strict=True):
        if applies:
            below[path].append(value)
    values: dict[Node, float] = {}
    spread: dict[Node, float] = {}
    # From the deepest parts up, each of which hands its mean on to the part before it.
    for depth in range(max(map(len, paths), default=0), 0, -1):
        for node in [node for node in below if len(node) == depth]:
            listed = torch.tensor(below[node], dtype=torch.float64)
            values[node], spread[node] = float(listed.mean()), float(listed.std(correction=0))
            if depth > 1:
                below[node[:-1]].append(values[node])
    divisor = {node: spread[node] + eps if scale == "siblings" else 1.0 for node in values}
    return {
        node: gain / divisor[node[:-1]] if (gain := value - values[node[:-1]]) else 0.0
        for node, value in values.items()
        if len(node) > 1
    }
