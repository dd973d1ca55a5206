"""PAV (arXiv 2410.08146): a step of an answer earns the increase in a prover's success rate.

Title: Rewarding Progress: Scaling Automated Process Verifiers for LLM Reasoning
Formula: A_k = r + alpha (V(end of step k) - V(its start)), V the prover's value of a prefix.
Our reading: the reward of the answer replaces Q, also in the last change.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import next_noted
from mmrl.advantages.select import increments
from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage
def process_advantage(table: RewardTable, *, alpha: NonNegativeFloat = 3.0) -> RewardTable:
    """Give each part of an answer the answer's reward plus `alpha` times its progress (PAV).

    arXiv 2410.08146. `table.values` (N, R, K) are the values of prefixes by a prover, then the reward of the
    answer; the result is (N, R, K - 1). The progress of a part is the change of the value over it. Put it
    after `mean_by_end`. Our readings: the reward of the answer stands for Q, and the last change is that to
    its reward.
    """
    last = table.last.clamp(min=0)[:, None, None].expand(-1, len(table.names), 1)
    reward, known = table.values.gather(2, last), table.valid.gather(2, last)
    progress = increments(table)
    return progress.replace(values=reward + alpha * progress.values, valid=progress.valid & known)


@advantage(of_others={"value"})
def verifier_values(table: RewardTable, *, against: str = "verifier") -> RewardTable:
    """Replace the rewards of prefixes by a critic's predicted values (PAV's verifier).

    arXiv 2410.08146. Prefixes whose completions were not sampled (`share` of `vision.with_prefix_rollouts`)
    get a value too; rewards of answers stay. Put it after `mean_by_end` and before `process_advantage`.
    `against` is the name of the critic in `references`; it learns from `value_targets`.
    """
    value = table.notes[f"{against}/value"]  # (N, T)
    if not value.shape[1]:
        return table
    prefix = table.present & (torch.arange(table.ends.shape[1]) != table.last[:, None])
    # A prefix is worth what is predicted before its next step; steps without a note are passed over.
    read = next_noted(value).gather(1, table.ends.clamp(0, value.shape[1] - 1))[:, None]
    return table.replace(
        values=torch.where(prefix[:, None], read.nan_to_num(), table.values),
        valid=torch.where(prefix[:, None], ~read.isnan(), table.valid),
    )
