"""TTRL (arXiv 2504.16084): the majority of many answers is the label; only some are learned from.

Title: TTRL: Test-Time Reinforcement Learning
Formula: statistics and learning over the first `keep` answers of a group, all of which vote.
Our reading: none in this file.
"""

from __future__ import annotations

from mmrl.advantages.normalize import BY_GROUP
from mmrl.config.ranges import PositiveInt, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable


@advantage
def keep_first(table: RewardTable, *, keep: PositiveInt, by: Tags = BY_GROUP) -> RewardTable:
    """Leave all but the first `keep` rows of a group out of statistics and learning (TTRL's samples).

    arXiv 2504.16084: all answers vote for the label, half of them are learned from. Put it first.
    """
    row = table.ids["row"][:, None].double()
    first = GroupStatistics(row, table.present[:, None], table.index(by)).rank() < keep
    return table.replace(valid=table.valid & first, learn=table.learn & first[:, 0])
