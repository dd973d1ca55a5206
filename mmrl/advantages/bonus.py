"""Advantage functions that add a bounded bonus, or grade answers by their order."""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label, noted, row_mean
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Probability, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable, name_id


@advantage
def capped_bonus(
    table: RewardTable,
    *,
    of: str,
    coef: float = 1.0,
    cap: NonNegativeFloat = 0.5,
    two_sided: bool = False,
    only_positive: bool = True,
    center: Literal["none", "length"] = "none",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Add a label to advantages, but at most `cap` times their size, so that no sign changes.

    A + min(max(coef x, 0), cap |A|). XRPO (arXiv 2510.06672) adds `novelty` to right answers (coef 2.5, cap
    0.5), VERL (arXiv 2509.23808) its own signal to all. ASPO (arXiv 2508.19201) rewards early code: x is the
    position of the first code block, `two_sided` with `center: length`, coef -2 and cap 0.7. An answer
    without the label has no bonus.

    Args:
        of: Name of the label x.
        coef: Factor of the label.
        cap: Largest bonus, in units of the answer's advantage.
        two_sided: Allow a bonus below 0, down to -cap |A|.
        only_positive: Only answers with an advantage above 0 have a bonus.
        center: Take x as it is (`none`), or less its mean and over the mean length in steps (`length`), both
            of the group's answers that may have a bonus; alone in its group an answer then has none.
        by: Keys that define a group.
    """
    x = label(table, of).expand_as(table.values)
    eligible = table.valid & ~x.isnan() & ((table.values > 0) | (not only_positive))
    if center == "length":
        index = table.index(by)
        length = table.ends.double()[:, None].expand_as(x)
        length = GroupStatistics(length, eligible, index).mean().clamp(min=1)
        x = (x - GroupStatistics(x, eligible, index).mean()) / length
    bound = cap * table.values.abs()
    bonus = torch.where(eligible, coef * x, 0.0).maximum(-bound if two_sided else torch.zeros_like(bound))
    return table.put(table.values + bonus.minimum(bound))


@advantage(notes={"entropy", "think"})
def strategic_entropy(
    table: RewardTable, *, coef: NonNegativeFloat = 0.4, kappa: PositiveFloat = 2.0
) -> RewardTable:
    """Add the entropy of tokens inside the thought to their advantages, bounded (arXiv 2508.05118).

    A + min(coef H, |A| / kappa), elsewhere A. With kappa above 1 no sign changes, and an advantage of 0 stays
    0. Our reading, since only the abstract is known: the formula and its constants, which are those of arXiv
    2506.14758. The engine `vision.with_think_region` notes where the thought is. Put it last.

    Args:
        coef: Factor of the entropy in nats.
        kappa: The bonus is at most the advantage's size over this.
    """
    table = per_step(table)
    entropy, think = noted(table, "entropy").nan_to_num(), noted(table, "think") == 1
    bonus = torch.minimum(coef * entropy[:, None], table.values.abs() / kappa)
    return table.put(torch.where(think[:, None] & table.valid, table.values + bonus, table.values))


@advantage(notes={"logp"})
def novelty(table: RewardTable, *, by: Tags = BY_GROUP) -> RewardTable:
    """Record how much less likely than its group an answer was, as the label `novelty` (arXiv 2510.06672).

    1 - exp(s - mean s), where s is the mean log-probability of an answer's tokens: above 0 for rare ones.
    Values stay; put `{name: capped_bonus, of: novelty}` after it (XRPO). Without noted log-probabilities
    (demonstrations) there is no label.
    """
    logp = row_mean(table, "logp")[:, None, None].expand(table.present[:, None].shape)
    known = table.present[:, None] & ~logp.isnan()
    relative = logp - GroupStatistics(logp, known, table.index(by)).mean()
    found = torch.where(known, 1 - relative.clamp(max=20).exp(), torch.nan)[:, 0]
    return table.replace(scored={**table.scored, "novelty": found})


@advantage
def serial_decay(table: RewardTable, *, by: Tags = BY_GROUP, base: PositiveFloat = 2.0) -> RewardTable:
    """Divide the reward of the c-th right answer of a group by 2^(c - 1) (S-GRPO, arXiv 2505.07686).

    For answers from successive cuts of one chain of thought, in the order of rows: earlier right exits earn
    more. An answer is right where its reward is not 0. With `by: [row]` the order is that of a row's
    outcomes. Put it after `total`, before `group_center`.
    """
    groups = table.groups(by)
    right = table.valid & (table.values.abs() > EQUAL)
    order = torch.arange(table.ends.numel(), dtype=torch.float64).view(table.ends.shape)[:, None]
    before = GroupStatistics(order.expand_as(table.values), right, groups.index).rank()
    return table.put(torch.where(right, table.values * base ** -before.double(), 0.0))


@advantage(notes={"entropy"})
def entropy_rank(
    table: RewardTable,
    *,
    of: str,
    max_reward: NonNegativeFloat = 0.1,
    share: Probability = 0.2,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Grade cut answers of groups without a right one by their entropies (SERR of R3, arXiv 2601.19620).

    One answer beats another whose peak entropy is lower and whose mean entropy is higher. Answers are
    ordered by how many they beat: the first earns `max_reward`, the last 0, those between at equal
    distances. The grade is added to all rewards of the chain; put it after `total`. Our readings: answers
    that beat equally many share their mean rank, and one alone earns nothing.

    Args:
        of: Name of the reward that is 0 for every wrong answer.
        max_reward: Grade of the first, in units of reward; below that of a right answer.
        share: Share of an answer's steps whose largest entropies make its peak, at least one step.
        by: Keys that define a group.
    """
    index, success = table.index(by), label(table, of)
    failed = GroupStatistics(success, ~success.isnan(), index).largest() <= EQUAL
    cut = (
        (table.ids["finish"] == name_id("length"))[:, None]
        if "finish" in table.ids
        else table.present[:, None]
    )
    entropy = table.notes["entropy"]
    ranked = failed & cut & table.present[:, None] & ~entropy.isnan().all(-1)[:, None, None]
    sizes = (share * (~entropy.isnan()).sum(-1).double() + 1e-9).long().clamp(min=1)
    ordered = entropy.nan_to_num(nan=-1.0).sort(-1, descending=True).values
    inside = torch.arange(entropy.shape[1]) < sizes[:, None]
    peak = torch.where(inside, ordered, 0.0).sum(-1) / sizes
    overall = entropy.nanmean(-1)
    grade = torch.zeros_like(success)
    for group in index[ranked[:, 0]].unique():
        rows, places = (ranked[:, 0] & (index == group)).nonzero(as_tuple=True)
        beats = (peak[rows, None] > peak[rows]) & (overall[rows, None] < overall[rows])
        wins = beats.sum(1)
        # Mean of the first and the last rank of a tie: the answers with more wins come before.
        rank = (wins > wins[:, None]).sum(1) + ((wins == wins[:, None]).sum(1).double() - 1) / 2
        if len(rows) > 1:
            grade[rows, 0, places] = max_reward * (1 - rank.double() / (len(rows) - 1))
    return table.put(table.values + grade)
