"""V_0.5 (arXiv 2603.10848): the baseline combines few rollouts with a predicted value of the prompt.

Title: V_0.5: Generalist Value Model as a Prior for Sparse RL Rollouts
Formula: A = r - w v - (1 - w) V, w = D / (D + 1 / k), D = max(0, (v - V)^2 - 1 / k).
Our reading: a group without a prediction is compared with its mean.
"""

from __future__ import annotations

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.loading import ConfigError
from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def shrunk_mean(
    table: RewardTable,
    *,
    of: str,
    low: float = 0.0,
    high: float = 1.0,
    by: Tags = BY_GROUP,
) -> RewardTable:
    """Subtract the mean of the group, shrunk to a predicted value of the prompt (V_0.5, arXiv 2603.10848).

    With rewards scaled to [-1, 1], k rollouts of the mean v and the prediction V, the baseline is w v + (1 -
    w) V, with w = D / (D + 1 / k) and D = max(0, (v - V)^2 - 1 / k): the prediction stands until the rewards
    contradict it. Equal rewards have an advantage too, and so has a single rollout. Our reading: a group
    without a prediction is compared with its mean.

    Args:
        of: Name of the label with the predicted mean reward, such as a `column_value`.
        low: Smallest reward.
        high: Largest reward.
        by: Keys that define a group.
    """
    if high <= low:
        raise ConfigError(f"`shrunk_mean` needs a `high` above `low`, not {low} to {high}")
    half = (high - low) / 2
    groups = table.groups(by)
    mean = groups.mean() / half
    prior = label(table, of).expand_as(mean) / half
    noise = 1 / groups.count().clamp(min=1)
    bias = ((mean - prior).square() - noise).clamp(min=0)
    trust = bias / (bias + noise)
    baseline = torch.where(prior.isnan(), mean, trust * mean + (1 - trust) * prior)
    return table.put(table.values - half * baseline)
