"""An advantage function that applies other advantage functions to some rewards or some rows only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from mmrl.config.ranges import TagWords
from mmrl.config.registry import advantage as register
from mmrl.core.reward_table import NAN, RewardTable, name_id


@register
def for_some(
    table: RewardTable,
    *,
    advantage: tuple[Callable[[RewardTable], RewardTable], ...],
    of: tuple[str, ...] = (),
    where: TagWords | None = None,
) -> RewardTable:
    """Apply advantage functions to some of the rewards, or to rows with certain tags.

    Other rewards and rows do not change, so that tasks or roles in one batch can have their own advantage
    functions.

    Args:
        advantage: The functions, in order.
        of: Names of rewards; empty: all.
        where: Tags that the last outcome of a row must have, such as `{role: spy}`; empty: all rows.
    """
    inside = torch.ones(len(table), dtype=torch.bool)
    for tag, value in (where or {}).items():
        answers = table.tag(tag).gather(1, table.last.clamp(min=0)[:, None])[:, 0]
        inside &= answers == name_id(value)
    unknown = [name for name in of if name not in table.names]
    if unknown:
        raise ValueError(
            f"the chain has no reward called '{unknown[0]}' here; it has {', '.join(table.names)}"
        )
    chosen = [i for i, name in enumerate(table.names) if name in of or not of]
    part = table.select(inside)
    part = part.replace(
        values=part.values[:, chosen],
        valid=part.valid[:, chosen],
        weights={name: table.weights[name] for name in (table.names[i] for i in chosen)},
    )
    return put_back(table, inside, chosen, reduce(lambda part, apply: apply(part), advantage, part))


def put_back(table: RewardTable, inside: Tensor, chosen: list[int], part: RewardTable) -> RewardTable:
    """Copy `part`, the sub-table of the rows `inside` (N,) bool and the rewards `chosen`, into `table`."""
    others = [i for i in range(len(table.names)) if i not in chosen]
    if inside.all() and not others:
        return part
    # `part` may have fewer outcomes per row than the table.
    table, part = table.widen(part), part.widen(table)
    same = torch.equal(part.ends, table.ends[inside])
    if inside.all():
        if not same:
            raise ValueError("`for_some` with `of` must keep the places, since the other rewards keep theirs")
        return part.replace(
            values=torch.cat([table.values[:, others], part.values], 1),
            valid=torch.cat([table.valid[:, others], part.valid], 1),
            weights={**{table.names[i]: table.weights[table.names[i]] for i in others}, **part.weights},
        )
    if not same or part.names != tuple(table.names[i] for i in chosen):
        raise ValueError(
            "`for_some` with `where` must keep the rewards and the places of its rows, but "
            f"{part.names} came of {table.names}; combine rewards before it"
        )
    values, valid, learn = table.values.clone(), table.valid.clone(), table.learn.clone()
    rows, columns = inside.nonzero(), torch.tensor(chosen)
    values[rows, columns], valid[rows, columns], learn[inside] = part.values, part.valid, part.learn

    def merged(whole: Mapping[str, Tensor], some: Mapping[str, Tensor]) -> dict[str, Tensor]:
        unknown = torch.full(table.ends.shape, NAN, dtype=torch.float64)  # for labels that only `part` has
        return {**whole, **{n: whole.get(n, unknown).index_copy(0, rows[:, 0], some[n]) for n in some}}

    return table.replace(
        values=values,
        valid=valid,
        learn=learn,
        scored=merged(table.scored, part.scored),
        ids=merged(table.ids, part.ids),
        notes=merged(table.notes, part.notes),
    )
