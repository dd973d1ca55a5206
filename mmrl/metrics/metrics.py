"""Metrics of the answers of a reward table.

Bootstrap intervals come from evaluating them on resampled tables.
"""

from __future__ import annotations

import torch

from mmrl.config.registry import metric
from mmrl.core.reward_table import RewardTable


@metric
def mean(table: RewardTable, *, of: str = "", label: str = "") -> dict[str, float]:
    """Mean of a reward over the answers to which it applies; without `of`, of every reward."""
    names = [of] if of else list(table.scored)
    return {label or name: float(table.at_end(name).nanmean()) for name in names}


@metric
def recall_at(
    table: RewardTable, *, of: str, at: tuple[float, ...], strict: bool = False, label: str = ""
) -> dict[str, float]:
    """Share of answers whose reward reaches a threshold, for each threshold, such as R1@m.

    R1@m is `of: temporal_iou, label: R1`.

    Args:
        of: Name of the reward.
        at: Thresholds.
        strict: Require more than the threshold, as in the later evaluator of Time-R1 (arXiv 2503.13377).
        label: Name before `@`; without it, that of the reward.
    """
    reward = table.at_end(of)
    known = reward[~reward.isnan()]
    passes = torch.gt if strict else torch.ge
    return {f"{label or of}@{bar:g}": float(passes(known, bar).double().mean()) for bar in at}
