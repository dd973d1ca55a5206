"""Step credit for denoising trajectories at turning points of the reward (TP-GRPO, arXiv 2602.06422)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def turning_points(
    table: RewardTable,
    *,
    consistent: bool = True,
    balance: bool = True,
    balance_key: Literal["delta_global", "aggregated"] = "delta_global",
    only_rising: bool = False,
    first_step: bool = True,
    atol: NonNegativeFloat = 0.0,
) -> RewardTable:
    """Turn prefix rewards (N, R, T + 1) into step credits (N, R, T) that stress turning points.

    A step is credited with its change of the reward, a turning point with the change from before this step to
    the end. A step is a turning point if it changes the reward in the direction of the row's overall change,
    and the step before changed it in the other direction; the first step only needs the first condition. A
    turning point whose change to the end is 0 counts in `balance`, as in the code, but is credited with its
    own change. A step without a reward before or after it has no credit; a row without its first or last
    reward has no turning points.

    Args:
        consistent: Require that the reward after a turning point moves in the same direction, so that credits
            are only amplified.
        balance: Keep equally many turning points of rising and of falling rows, if there are both; the others
            earn their own change. Our reading: balance over the whole batch (the code: over a micro-batch),
            and keep the first of ties.
        balance_key: What `balance` keeps: largest overall change (`delta_global`) or credit (`aggregated`).
        only_rising: Allow turning points only in rows whose reward rose overall.
        first_step: Allow the first step as a turning point (the code's `apply_first_step_bonus`).
        atol: A change of at most this size, in units of reward, has no sign (our reading).
    """
    reward, known = table.values, table.valid
    if table.ends.shape[1] == 1:  # no row has a step
        return table.after_first(reward[..., 1:])

    def change(after: Tensor, before: Tensor, both: Tensor) -> Tensor:
        return torch.where(both, after - before, 0.0)  # unknown: 0, which has no sign

    def sign(difference: Tensor) -> Tensor:
        return torch.where(difference.abs() <= atol, 0.0, difference.sign())

    increment = change(reward[..., 1:], reward[..., :-1], known[..., :-1] & known[..., 1:])  # (N, R, T)
    last = table.last.clamp(min=0)[:, None, None].expand(-1, reward.shape[1], 1)
    ended = known.gather(2, last)
    remaining = change(reward.gather(2, last), reward[..., :-1], known[..., :-1] & ended)  # to the last step
    trend = remaining[..., :1]  # (N, R, 1): change over the whole row
    agrees = sign(increment) * sign(trend)  # 1: with the trend, -1: against it, 0: one has no sign
    turning = agrees > 0
    turning[..., 1:] &= agrees[..., :-1] < 0  # the step before went against the trend
    if consistent:
        turning &= sign(increment) * sign(remaining - increment) > 0  # the later change has the same sign
    if only_rising:
        turning &= trend > atol
    if not first_step:
        turning[..., :1] = False
    if balance:
        key = trend.expand_as(turning) if balance_key == "delta_global" else remaining
        turning = _balanced(turning, trend, key)
    credit = table.after_first(torch.where(turning & (remaining != 0), remaining, increment))
    return credit.replace(valid=credit.valid & known[..., :-1])


def _balanced(turning: Tensor, trend: Tensor, key: Tensor) -> Tensor:
    """Keep equally many turning points of rising and falling rows per reward, if there are both."""
    kept = torch.zeros_like(turning)
    for i in range(turning.shape[1]):
        sides = [(turning[:, i] & (sign * trend[:, i] > 0)).nonzero() for sign in (1, -1)]
        fewest = min(map(len, sides)) or max(map(len, sides))  # with one side only, keep all
        for places in sides:
            size = key[:, i][places[:, 0], places[:, 1]].abs()
            rows, steps = places[size.argsort(descending=True, stable=True)[:fewest]].unbind(1)
            kept[rows, i, steps] = True
    return kept
