"""KL-Cov (arXiv 2505.22617): a KL penalty where log-probability and advantage covary most.

Title: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models
Formula: L = -rho A + coef |log rho| at the steps of highest (A - mean A) (logp - mean logp).
Our reading: the log-probability is noted while sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.select import per_step
from mmrl.advantages.tokens import covariance_of_steps
from mmrl.config.ranges import NonNegativeFloat, Probability
from mmrl.config.registry import advantage, penalty
from mmrl.core.reward_table import RewardTable
from mmrl.core.step_table import Batch, StepOutput
from mmrl.objectives.surrogates import step_ratio


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


@penalty
def covariance_kl(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 1.0, against: str = "old"
) -> Tensor:
    """Size of the log-ratio at steps that `high_covariance` noted (KL-Cov, arXiv 2505.22617).

    It holds steps whose probability and advantage rise together, which lower the entropy fastest. It is felt
    from the second update of a collection. Raises `ValueError` where nothing was noted.
    """
    marked = batch.notes.get("high_covariance")
    if marked is None:
        if (batch.mask > 0).any():  # a process without rows has no notes
            raise ValueError(
                "`covariance_kl` reads the note `high_covariance`; put the advantage function "
                "`high_covariance` at the end of the chain"
            )
        return torch.zeros_like(new.logp)
    gap = step_ratio(new, batch, against=against).abs()
    return coef * torch.where(marked > 0, gap, 0.0)
