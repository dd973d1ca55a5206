"""Advantage functions that read the entropies and log-probabilities of single steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(notes={"entropy", "logp"})
def keep_steps(
    table: RewardTable,
    *,
    of: Literal["entropy", "logp", "weighted_entropy"] = "entropy",
    at_least: float | None = None,
    at_most: float | None = None,
    top: Probability | None = None,
    level: Literal["step", "row"] = "step",
    drop: bool = False,
    if_mean_inside: bool = False,
) -> RewardTable:
    """Keep the advantages of steps, or of rows, whose entropy or log-probability is in a range.

    Other steps get advantage 0, but the loss still averages over them. GTPO (arXiv 2508.03772) keeps rows
    with a mean entropy of at most 0.7; SPO (arXiv 2505.23564) keeps steps with a log-probability of at most
    log 0.9; D3S (arXiv 2509.22115) keeps steps with the largest `weighted_entropy`. Our reading: steps
    without a record (demonstrations) are kept.

    Args:
        of: `entropy` in nats, `logp` of the sampled token, or `weighted_entropy`: |advantage| times entropy.
        at_least: Lower bound of the value, or null for none.
        at_most: Upper bound of the value, or null for none.
        top: Fraction of the largest values to keep, among the steps that are learned from; null: all.
        level: `step`: compare the value of every step. `row`: compare the mean value of every row.
        drop: Drop the other steps, so that the loss does not average over them.
        if_mean_inside: Apply the bounds only if the batch mean of the value is within them. (GTPO does this
            if the entropy exceeds log 2 at the start of training.)
    """
    table = per_step(table)
    value = noted(table, "logp" if of == "logp" else "entropy")
    if of == "weighted_entropy":
        value = value * torch.where(table.valid, table.values, 0.0).abs().amax(1)
    value = torch.where(table.present, value, torch.nan)
    if level == "row":
        value = value.nanmean(-1, keepdim=True).expand_as(value)
    known = ~value.isnan() & table.present
    inside = torch.ones_like(known)
    if at_least is not None:
        inside &= value >= at_least
    if at_most is not None:
        inside &= value <= at_most
    ranked = known & table.learn  # dropped rows do not count
    if top is not None and ranked.any():
        number = max(1, round(top * int(ranked.sum())))
        # `topk` breaks ties by index and, unlike `quantile`, has no size limit.
        chosen = torch.where(ranked, value, -torch.inf).flatten().topk(number).indices
        inside &= torch.zeros_like(known).view(-1).index_fill(0, chosen, True).view(known.shape)
    kept = inside | ~known
    if if_mean_inside and known.any():
        mean = value[known].mean()
        kept |= (at_least is not None and mean < at_least) or (at_most is not None and mean > at_most)
    if drop:
        return table.replace(learn=table.learn & kept)
    return table.put(torch.where(kept[:, None], table.values, 0.0))


def covariance_of_steps(table: RewardTable) -> tuple[Tensor, Tensor]:
    """Compute (A - mean A) (logp - mean logp) per step, and a mask of defined steps: (N, R, T) each."""
    logp = noted(table, "logp")
    known = (table.present & ~logp.isnan())[:, None] & table.valid
    count = known.sum((0, 2), keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        mean = torch.where(known, values, 0.0).sum((0, 2), keepdim=True) / count
        return torch.where(known, values - mean, 0.0)

    return centred(table.values) * centred(logp[:, None].expand_as(table.values)), known
