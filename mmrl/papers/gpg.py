"""GPG (arXiv 2504.02546): scale advantages by the share of non-zero ones.

Title: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning
Formula: A' = A n / (number of values that are not 0).
Our reading: if all values are 0, they stay 0.
"""

from __future__ import annotations

from mmrl.config.ranges import Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


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
