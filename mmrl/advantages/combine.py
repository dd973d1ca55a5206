"""Advantage functions that combine rewards, and weigh groups by how hard or how certain they are."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import clusters, label
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import EQUAL, GroupStatistics, RewardTable, name_id


@advantage
def variance_weights(table: RewardTable, *, by: Tags = BY_GROUP, eps: NonNegativeFloat = 1e-6) -> RewardTable:
    """Normalise each reward in its group, and weigh it by its deviation there (DVAO, arXiv 2605.25604).

    A = sum_k w_k (r_k - mean_k) / (sum_k |w_k| std_k + eps): a reward that hardly varies is not blown up, and
    no advantage is larger than GRPO's of the weighted sum. It stands for `total` and `group_normalize`; with
    one reward it is GRPO. Our readings: eps, and the size of a negative weight. A reward that does not apply
    adds nothing.
    """
    groups = table.groups(by)
    centred = torch.where(table.valid & ~groups.flat(), table.values - groups.mean(), 0.0)
    weights = torch.tensor(list(table.weights.values()), dtype=torch.float64)[:, None]
    spread = (weights.abs() * groups.std()).sum(1, keepdim=True)
    credit = (weights * centred).sum(1, keepdim=True)
    return table.replace(
        values=torch.where(credit == 0, 0.0, credit / (spread + eps)),  # with an eps of 0: not 0 / 0
        valid=table.valid.any(1, keepdim=True),
        weights={"total": 1.0},
    )


@advantage
def active_scale(table: RewardTable, *, by: Tags = ()) -> RewardTable:
    """Multiply by the number of values over the number that are not 0 (GPG, arXiv 2504.02546).

    GPG counts rewards of the collection: put it after `total`, before `group_center`. MC-GRPO (arXiv
    2601.22582) counts advantages of the group: put it after `group_median` with `by: [group, place]`. Where
    all values are 0, so are the results.
    """
    groups = table.groups(by)
    active = GroupStatistics(table.values, table.valid & (table.values != 0), groups.index).count()
    return table.put(table.values * groups.count() / active.clamp(min=1))


@advantage
def asymmetric_difficulty(
    table: RewardTable,
    *,
    of: str,
    alpha: PositiveFloat = 1.0,
    by: Tags = BY_GROUP,
    eps: PositiveFloat = 1e-6,
) -> RewardTable:
    """Stress easy groups early and hard ones late, and wrong answers early (A-GRAE, arXiv 2602.05548).

    With p the mean reward of the group and P the mean of all p, an advantage A becomes
    A ((1 - P) / 2 / (1 - sqrt(p) + eps) + P / 2 / (sqrt(p) + eps)); what is above 0 is then multiplied by
    min(1, P / alpha). Raises `ValueError` for means outside 0 to 1. Our reading: it acts at every step,
    where the code compares a scheduled weight with a constant.

    Args:
        of: Name of the reward that counts as success, between 0 and 1.
        alpha: Mean success from which right answers count in full (0.5 for geometry and medical images).
        by: Keys that define a group.
        eps: Added to both divisors.
    """
    success = label(table, of)
    known = ~success.isnan()
    groups = GroupStatistics(success, known, table.index(by))
    p = groups.mean()
    if known.any() and not (p.min() >= -EQUAL and p.max() <= 1 + EQUAL):
        span = f"{p.min().item():g} to {p.max().item():g}"
        raise ValueError(f"'{of}' must be a success between 0 and 1; the means of groups go from {span}")
    p = p.clamp(0, 1)
    share = torch.where(known, 1 / groups.count().clamp(min=1), 0.0)  # every group counts once
    progress = (share * p).sum() / share.sum().clamp(min=1)
    root = p.sqrt()
    weight = 0.5 * ((1 - progress) / (1 - root + eps) + progress / (root + eps))
    rising = (progress / alpha).clamp(max=1)
    credit = table.values * weight
    return table.put(torch.where(credit > 0, credit * rising, credit))


@advantage
def adora(
    table: RewardTable,
    *,
    of: str,
    threshold: float = 0.5,
    factor: NonNegativeFloat = 0.1,
    no_success: Literal["keep", "scale"] = "keep",
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Scale groups down whose right answers are not longer than the wrong ones (ADORA).

    A group keeps its advantages where its longest right answer is longer than the mean of its wrong answers
    that were not cut at the length limit. Where all wrong answers were cut, or none is wrong, it is scaled,
    as in the code for images. Published as code only (ShadeCloak/ADORA).

    Args:
        of: Name of the reward that counts as success.
        threshold: An answer is right above this reward (1.01 in the code for text).
        factor: Factor of the groups that are scaled down.
        no_success: What happens to a group without a right answer: `keep` as in the code for images, `scale`
            as in that for text.
        by: Keys that define a group.
    """
    success, index = label(table, of), table.index(by)
    length = table.ends.double()[:, None]
    right = success > threshold  # False for NaN
    cut = (table.ids["finish"] == name_id("length"))[:, None] if "finish" in table.ids else False
    wrong = (success <= threshold) & ~torch.as_tensor(cut)
    wrongs = GroupStatistics(length, wrong, index)
    mean = torch.where(wrongs.count() > 0, wrongs.mean(), torch.inf)
    longest = GroupStatistics(length, right, index).largest()
    kept = longest > mean
    if no_success == "keep":
        kept = kept | longest.isinf()  # -inf: no right answer
    return table.put(torch.where(kept, table.values, factor * table.values))


def cluster_entropy(
    table: RewardTable, of: str, by: tuple[str, ...], weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each group's entropy over clusters of answers, and the number of its answers: (N, 1, K) each.

    `of` is a label that is equal for answers of one cluster; an answer without it is a cluster of its own.
    `weight` (N, 1, K) is the share of an answer in its group.
    """
    index, present = table.index(by), table.present[:, None]
    mass = GroupStatistics(weight, present, clusters(table, of, index)).sum()
    # - sum_c p_c log p_c, as a sum over answers: the shares of a cluster add up to its p_c.
    entropy = GroupStatistics(-weight * mass.clamp(min=1e-300).log(), present, index).sum()
    return entropy, GroupStatistics(weight, present, index).count()


@advantage
def consistency_mix(
    table: RewardTable,
    *,
    of: str,
    gamma: NonNegativeFloat = 20.0,
    threshold: NonNegativeFloat = 0.837,
    by: Tags = BY_GROUP,
    eps: PositiveFloat = 1e-6,
) -> RewardTable:
    """Mix a group's advantages with one of the prompt, where its answers agree (COPO, arXiv 2508.04138).

    With H the entropy of the group over clusters of equal answers, w = sigmoid(gamma (H - threshold log G));
    A = w (r - mean) / std + (1 - w) (m - mean of m) / std of m, where m is the group's mean reward: prompts
    are compared with each other (deviation over their number). It stands for `group_normalize`, after
    `total`. Our readings: it mixes advantages where the paper mixes losses, which is equal where nothing is
    clipped; the logarithm is natural, and the paper's threshold of 1.5 for six answers is 0.837 log G.

    Args:
        of: Name of the label that is equal for answers of one cluster, such as `answer_cluster`.
        gamma: Steepness of the gate.
        threshold: Entropy of an even mixture, in units of log G.
        by: Keys that define a group.
        eps: Added to both deviations.
    """
    groups, index = table.groups(by), table.index(by)
    present = table.present[:, None]
    share = torch.where(present, 1 / GroupStatistics(index[:, None].double(), present, index).count(), 0.0)
    entropy, count = cluster_entropy(table, of, by, share)
    gate = torch.sigmoid(gamma * (entropy - threshold * count.clamp(min=1).log()))
    local = torch.where(groups.flat(), 0.0, (table.values - groups.mean()) / (groups.std() + eps))
    # In the comparison of prompts each counts once.
    once = table.valid & (groups.rank() == 0)
    means = GroupStatistics(groups.mean(), once, table.index(()))
    apart = (groups.mean() - means.mean()) / (means.std(unbiased=False) + eps)
    mixed = gate * local + (1 - gate) * torch.where(means.flat(), 0.0, apart)
    return table.put(mixed)
