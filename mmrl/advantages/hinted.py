"""Advantage functions for groups in which some rollouts saw a hint: which rows count, what a hint earns."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmrl.config.ranges import PositiveFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable

HINT, WROTE = "hint", "wrote"  # ids of answers that saw a hint, and of the hint itself


def hint_of(table: RewardTable, tag: str = HINT) -> Tensor:
    """Return the id of the hint that each row saw, or with the tag "wrote" is: (N,), 0 without one."""
    return table.ids[tag][:, 0] if tag in table.ids else torch.zeros(len(table), dtype=torch.int64)


def successes(table: RewardTable, of: str, threshold: float) -> Tensor:
    """Return which rows have a reward above a threshold: (N,) bool, False where none applies."""
    if not of and not set(table.names) <= set(table.scored):
        raise ValueError(
            "it compares the rewards as measured; put it before `total`, or name one reward in `of`"
        )
    return (table.at_end(of) if of else table.reward()) > threshold  # NaN is never above


def keep_rows(table: RewardTable, kept: Tensor) -> RewardTable:
    """Leave rows (N,) that are not kept out of statistics and of learning."""
    return table.replace(valid=table.valid & kept[:, None, None], learn=table.learn & kept[:, None])


@advantage
def best_hint(
    table: RewardTable,
    *,
    of: str = "",
    threshold: float = 0.0,
    reliance: str = "",
    temperature: PositiveFloat = 0.3,
) -> RewardTable:
    """Keep the rows of the hint whose answers tell most, instead of a failed group (HiLL).

    arXiv 2604.00698. A hint with n answers, a share p of which succeeds, has the value 1 - p^n - (1 - p)^n:
    the probability that n answers are not all alike. With `reliance` it is discounted by exp(min(d, 0) /
    `temperature`), where d is the mean of that label over the successes. The best hint's rows replace the
    group where 1 - p^n - (1 - p)^n is above that of the plain rows; otherwise the plain rows stay. Put it
    first in the chain, with the sampler `with_hints` and `num_hinted` of 2 or more. Rows that are hints stay;
    `hint_reward` pays them by the same value.

    Args:
        of: Name of the reward that must be above `threshold`; empty: the weighted sum.
        threshold: The highest reward that counts as a failure.
        reliance: Label that the engine `vision.with_hint_reliance` records; empty: no discount.
        temperature: Change of the label that discounts by a factor of e.
    """
    hint, answers = hint_of(table), hint_of(table, WROTE) == 0
    success, relied = successes(table, of, threshold), reliances(table, reliance)
    kept = torch.ones(len(table), dtype=torch.bool)
    for group in table.group.unique().tolist():
        rows = (table.group == group) & answers
        # Sorted by first occurrence, so that of equal hints the weakest, which was asked first, is taken.
        hints = list(dict.fromkeys(hint[rows & (hint != 0)].tolist()))
        if not hints:
            continue
        shown = {name: rows & (hint == name) for name in hints}
        best = max(hints, key=lambda name: hint_value(success[shown[name]], relied[shown[name]], temperature))
        plain = rows & (hint == 0)
        stays = bool(plain.any()) and informativeness(success[shown[best]]) <= informativeness(success[plain])
        kept[rows & ~(plain if stays else shown[best])] = False
    return keep_rows(table, kept)


@advantage
def hint_reward(
    table: RewardTable,
    *,
    of: str,
    threshold: float = 0.0,
    reliance: str = "",
    temperature: PositiveFloat = 0.3,
) -> RewardTable:
    """Pay rows that are hints for what the answers to their prompts did with them (HiLL).

    arXiv 2604.00698. What `best_hint` calls the value of a hint is added to the reward of the row that wrote
    it; it is 0 where its answers tell no more than the plain ones: all of them right, or all wrong. Put it
    after `total`, with the engine `with_hinter`, and compare hints with hints: `{name: group_normalize, by:
    [group, place, role]}`. Answers keep their rewards.

    Args:
        of: Name of the reward of answers that must be above `threshold`.
        threshold: The highest reward that counts as a failure.
        reliance: Label that the engine `vision.with_hint_reliance` records; empty: no discount.
        temperature: Change of the label that discounts by a factor of e.
    """
    wrote, hint = hint_of(table, WROTE), hint_of(table)
    success, relied = successes(table, of, threshold), reliances(table, reliance)
    values = table.values.clone()
    for row in (wrote != 0).nonzero()[:, 0].tolist():
        group = table.group == table.group[row]
        shown, plain = group & (hint == wrote[row]), group & (hint == 0) & (wrote == 0)
        before = informativeness(success[plain]) if plain.any() else 0.0
        # No answer saw a hint that could not be used.
        if shown.any() and informativeness(success[shown]) > before:
            values[row] += hint_value(success[shown], relied[shown], temperature)
    return table.put(torch.where(table.valid, values, table.values))


def reliances(table: RewardTable, label: str) -> Tensor:
    """Return how much each answer relies on its hint, from a label: (N,), 0 where none was recorded."""
    return table.at_end(label).nan_to_num() if label else torch.zeros(len(table), dtype=torch.float64)


def hint_value(success: Tensor, reliance: Tensor, temperature: float) -> float:
    """Return what a hint's n answers are worth: how informative they are, discounted by their reliance."""
    relied = float(reliance[success].mean()) if success.any() else 0.0
    return informativeness(success) * math.exp(min(relied, 0.0) / temperature)


def informativeness(success: Tensor) -> float:
    """Return 1 - p^n - (1 - p)^n: how likely n answers are not all alike, of which a share p is right."""
    n, p = len(success), float(success.double().mean())
    return 1.0 - p**n - (1.0 - p) ** n
