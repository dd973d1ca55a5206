"""ADORA (arXiv 2602.10019): scale down groups whose right answers are not longer than the wrong ones.

Title: ADORA: Training Reasoning Models with Dynamic Advantage Estimation on Reinforcement Learning
Formula: A' = A where max length of right > mean length of wrong, else `factor` A.
Our reading: truncated answers count as the code's answers of more than 4094 tokens; the rule is from the
code for images.
"""

from __future__ import annotations

from typing import Literal

import torch

from mmrl.advantages.normalize import BY_GROUP
from mmrl.advantages.notes import label
from mmrl.config.ranges import NonNegativeFloat, Tags
from mmrl.config.registry import advantage
from mmrl.core.reward_table import GroupStatistics, RewardTable, name_id


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
    """Scale down groups with right answers no longer than the wrong ones (ADORA).

    A group keeps its advantages where its longest right answer is longer than the mean of its wrong answers
    that were not cut at the length limit. Where all wrong answers were cut, or none is wrong, it is scaled,
    as in the code for images. Code: ShadeCloak/ADORA.

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
