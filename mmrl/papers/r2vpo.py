"""R2VPO (arXiv 2601.03320): a squared penalty on ratios different from 1 instead of clipping.

Title: Ratio-Variance Regularized Policy Optimization for Efficient LLM Fine-tuning
Formula: loss = -ratio A + coef (ratio - 1)^2.
Our reading: this form, and the coefficient; only the abstract was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import penalty
from mmrl.core.step_table import Batch, StepOutput
from mmrl.objectives.surrogates import step_ratio


@penalty
def ratio_variance(
    new: StepOutput, batch: Batch, *, coef: NonNegativeFloat = 0.04, against: str = "old"
) -> Tensor:
    """Squared distance of the ratio to 1, instead of a clip (R2VPO, arXiv 2601.03320).

    Its mean is the variance of the ratio under the policy that sampled. Our reading, since only the abstract
    is known: this form, and the coefficient. Log-ratios count within [-20, 20]. Use it with `unclipped`.
    """
    return coef * torch.expm1(step_ratio(new, batch, against=against).clamp(-20.0, 20.0)).square()
