"""BGPO (arXiv 2510.11683): a lower bound of the surrogate, linear in the log-ratio where A > 0.

Title: Boundary-Guided Policy Optimization for Memory-efficient RL of Diffusion Large Language Models
Formula: gain = (1 + d) A for A >= 0, exp(d) A for A < 0, with the log-ratio d of a step.
Our reading: with a token policy a step is a token, where the paper's is one draw of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.registry import surrogate
from mmrl.core.step_table import Batch, StepOutput


@surrogate
def linear_bound(log_ratio: Tensor, new: StepOutput, batch: Batch) -> Tensor:
    """Lower bound of the unclipped surrogate, linear in good steps' log-ratios (BGPO, arXiv 2510.11683).

    The gain of a log-ratio d is (1 + d) A for A >= 0 and exp(d) A for A < 0. Where a step is one draw of a
    mask of a diffusion model and d its log-ratio, `sequence_mean` bounds the surrogate of the mean over
    draws, which no draw could be differentiated through alone. d is limited to [-20, 20].
    """
    held = log_ratio.clamp(-20.0, 20.0)
    return -batch.advantage * torch.where(batch.advantage >= 0, 1 + held, held.exp())
