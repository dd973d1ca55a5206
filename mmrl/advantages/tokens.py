"""Advantage functions that read the tokens, entropies and log-probabilities of single steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.notes import noted, row_mean
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable
from mmrl.core.tensor import group_count


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

    All others have advantage 0 and stay in every denominator. GTPO (arXiv 2508.03772) keeps rows of a mean
    entropy of at most 0.7, SPO (arXiv 2505.23564) steps of a log-probability of at most log 0.9, D3S (arXiv
    2509.22115) the steps of largest |A| H. What was not noted (demonstrations) is kept: our reading.

    Args:
        of: `entropy` in nats, the `logp` of the sampled token, or |advantage| times entropy
            (`weighted_entropy`).
        at_least: Smallest value that is kept, or null for none.
        at_most: Largest value that is kept, or null for none.
        top: Keep this share of the largest values of the steps that are learned from, or null for all.
        level: Judge each `step`, or each `row` by its mean.
        drop: Do not learn from the others at all, so that denominators do not count them either.
        if_mean_inside: Act only where the mean of the collection is in the range, and keep all elsewhere (as
            GTPO does where the entropy exceeds log 2 from the start).
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
    ranked = known & table.learn  # rows that were dropped take up no share
    if top is not None and ranked.any():
        number = max(1, round(top * int(ranked.sum())))
        # `topk` breaks ties by place, and has no limit of size as `quantile` does.
        chosen = torch.where(ranked, value, -torch.inf).flatten().topk(number).indices
        inside &= torch.zeros_like(known).view(-1).index_fill(0, chosen, True).view(known.shape)
    kept = inside | ~known
    if if_mean_inside and known.any():
        mean = value[known].mean()
        kept |= (at_least is not None and mean < at_least) or (at_most is not None and mean > at_most)
    if drop:
        return table.replace(learn=table.learn & kept)
    return table.put(torch.where(kept[:, None], table.values, 0.0))


@advantage(notes={"token", "entropy"})
def conflict_tokens(
    table: RewardTable,
    *,
    positive: NonNegativeFloat = 2.0,
    negative: NonNegativeFloat = 0.0,
    entropy_coef: NonNegativeFloat = 0.1,
    per_conflict: bool = True,
) -> RewardTable:
    """Spare tokens that good and bad answers share at their start or end (GTPO, arXiv 2508.03772).

    A token is in conflict where, at the same place, it occurs with an advantage above 0 and with one below
    0; places are counted from the start and from the end, and only the unbroken run from there counts. An
    advantage A becomes lambda (A - entropy_coef H) / max(n, 1), where H is the row's mean entropy and n its
    number of tokens in conflict. Rows of advantage 0 make no conflicts, and pay for their entropy alike.
    Departs: the released code counts fewer tokens in conflict, because it joins the two runs with the second
    still reversed.

    Args:
        positive: Factor of a token in conflict with an advantage above 0, once from the start and once from
            the end.
        negative: The same for an advantage below 0.
        entropy_coef: Cost of the row's mean entropy in nats, in units of advantage.
        per_conflict: Divide by n, as the code does.
    """
    table = per_step(table)
    token = noted(table, "token")
    known = table.present & ~token.isnan()
    # Steps with a token come first: one without (of a tool) neither breaks a run nor has a place.
    order = (~known).long().sort(dim=-1, stable=True).indices
    token, back, length = token.gather(1, order), order.argsort(-1), known.sum(-1, keepdim=True)
    places = torch.arange(token.shape[1]).expand_as(token)
    mirrored = (length - 1 - places).clamp(min=0)  # the same place counted from the end of its own row
    entropy = row_mean(table, "entropy").nan_to_num()[:, None]
    columns = []
    for values, valid in zip(table.values.unbind(1), table.valid.unbind(1), strict=True):
        sign = torch.where(valid & known, values, 0.0).sign()
        first = sign.gather(1, order)
        forward = _run(_conflicts(table, token, first, places)).gather(1, back)
        backward = _conflicts(table, token, first, mirrored).gather(1, mirrored)  # from the end on
        backward = _run(backward).gather(1, mirrored).gather(1, back) & known
        factor = torch.where(sign > 0, positive, negative)
        weight = torch.where(forward, factor, 1.0) * torch.where(backward, factor, 1.0)
        number = (forward | backward).sum(-1, keepdim=True).clamp(min=1) if per_conflict else 1
        columns.append(weight * (values - entropy_coef * entropy) / number)
    return table.put(torch.stack(columns, 1))


def _conflicts(table: RewardTable, token: Tensor, sign: Tensor, places: Tensor) -> Tensor:
    """Mark tokens that occur with both signs at one place of a group: (N, T) bool."""
    if not token.numel():
        return torch.zeros_like(token, dtype=torch.bool)
    group = table.ids["group"].unique(return_inverse=True)[1]
    number = token.nan_to_num(nan=-1.0).long() + 1
    # One key of group, place and token, because rows of three columns are sorted ten times as slowly.
    key = (group * token.shape[1] + places) * (number.max() + 1) + number
    index = key.flatten().unique(return_inverse=True)[1]
    both = (group_count(index, sign.flatten() > 0) > 0) & (group_count(index, sign.flatten() < 0) > 0)
    return both.view(sign.shape) & (sign != 0)


def _run(mask: Tensor) -> Tensor:
    """Keep what is True from the first step on without a break."""
    return mask.long().cumprod(-1).bool()


@advantage(notes={"logp"})
def high_covariance(table: RewardTable, *, share: Probability = 2e-4) -> RewardTable:
    """Note the steps of highest covariance, for the penalty `covariance_kl` (KL-Cov, arXiv 2505.22617).

    The note `high_covariance` is 1 for the `share` of the collection's steps, at least one, with the largest
    (A - mean A) (logp - mean logp), else 0. Our reading: the log-probability is the one that was noted when
    sampling. Put it last.
    """
    table = per_step(table)
    covariance, known = covariance_of_steps(table)
    largest = torch.where(known, covariance, -torch.inf)
    marked = torch.zeros_like(largest)
    if known.any():
        number = max(1, int(share * int(known.sum())))
        marked.view(-1)[largest.flatten().topk(number).indices] = 1.0
    return table.note("high_covariance", marked.amax(1))


def covariance_of_steps(table: RewardTable) -> tuple[Tensor, Tensor]:
    """Compute (A - mean A) (logp - mean logp) over all steps, and where it is known: (N, R, T) each."""
    logp = noted(table, "logp")
    known = (table.present & ~logp.isnan())[:, None] & table.valid
    count = known.sum((0, 2), keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        mean = torch.where(known, values, 0.0).sum((0, 2), keepdim=True) / count
        return torch.where(known, values - mean, 0.0)

    return centred(table.values) * centred(logp[:, None].expand_as(table.values)), known
