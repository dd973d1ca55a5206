"""Tree structure of answers that branch off from each other, as nodes and segments."""

from __future__ import annotations

import torch
from torch import Tensor

Node = tuple[int, ...]  # group id, then segment numbers from the root


def leaf_of(group: int, number: Tensor, row: int) -> Node:
    """Return a row's leaf in the tree as (group, segment numbers); `number` (T,) is the segment per step."""
    numbers = number[~number.isnan()].long()
    if not len(numbers):
        return (group, -1 - row)
    return (group, *torch.unique_consecutive(numbers).tolist())


def parts_of(path: Node, number: Tensor) -> list[tuple[Node, Tensor]]:
    """List the segments of a row as tree nodes, each with a mask (T,) bool of its steps."""
    if path[1] < 0:
        return [(path, torch.ones_like(number, dtype=torch.bool))]
    return [(path[: depth + 1], number == path[depth]) for depth in range(1, len(path))]
