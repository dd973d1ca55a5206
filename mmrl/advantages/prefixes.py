"""Values of the prefixes of an answer, from the rewards of their completions."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.registry import advantage
from mmrl.core.reward_table import ABSENT, RewardTable


@advantage
def mean_by_end(table: RewardTable, *, best: bool = False) -> RewardTable:
    """Estimate the value of each answer prefix: mean reward of its completions (SPO, arXiv 2505.23564).

    Outcomes with the same `end` complete the same prefix. Labels are averaged too; rewards that do not apply
    are ignored. With `best` the value is the largest reward, as for a prover that keeps its best sample (PAV,
    arXiv 2410.08146).
    """
    ends, present = table.ends, table.present
    if not ends.numel():
        return table
    first = present.clone()
    first[:, 1:] &= ends[:, 1:] != ends[:, :-1]
    slot = (first.cumsum(1) - 1).clamp(min=0)  # (N, K): the new index of every outcome
    width = int(slot.max()) + 1

    def gathered(values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce outcomes (N, R, K) to one per end, (N, R, width); also return where rewards apply."""
        index = slot[:, None].expand_as(values)
        count = values.new_zeros(*values.shape[:2], width).scatter_add(2, index, known.to(values))
        if best:
            lowest = torch.full_like(count, -torch.inf)
            filled = torch.where(known, values, -torch.inf)
            return torch.where(count > 0, lowest.scatter_reduce(2, index, filled, "amax"), 0.0), count > 0
        total = torch.zeros_like(count).scatter_add(2, index, torch.where(known, values, 0.0))
        return total / count.clamp(min=1), count > 0

    values, valid = gathered(table.values, table.valid)
    # Of outcomes with the same end, keep the last one.
    places = torch.zeros(len(table), width, dtype=torch.int64)
    at = torch.arange(ends.shape[1]).expand_as(ends)
    places.scatter_reduce_(1, slot, torch.where(present, at, 0), "amax")
    filled = torch.arange(width) < first.sum(1, keepdim=True)
    reduced = table.take(places, values, torch.where(filled, ends.gather(1, places), ABSENT))
    labels = {}
    for name, column in table.scored.items():
        mean, known = gathered(column[:, None], (present & ~column.isnan())[:, None])
        labels[name] = torch.where(known, mean, torch.nan)[:, 0]
    return reduced.replace(valid=valid & filled[:, None], scored=labels)
