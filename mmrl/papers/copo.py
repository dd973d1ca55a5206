"""COPO (arXiv 2508.04138): compare prompts instead of answers where the answers to a prompt agree.

Title: COPO: Consistency-Aware Policy Optimization
Formula: A = w (r - mean) / std + (1 - w) (m - mean m) / std m, w = sigmoid(gamma (H - threshold log G)), m
the mean of a group.
Our reading: advantages are mixed instead of losses; the logarithm is natural.
"""

from __future__ import annotations

import torch

from mmrl.advantages.combine import cluster_entropy
from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


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
