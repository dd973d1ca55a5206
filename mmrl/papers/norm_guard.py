"""NormGuard (arXiv 2606.27771): a penalty on velocities that are longer than the reference's.

Title: NormGuard: Reward-Preserving Norm Constraints in Flow-Matching Reinforcement Learning
Formula: coef max(0, |v| - factor |v_ref|).
Our reading: the length is a root mean square, the hinge is not squared, and both constants are ours.
"""

from __future__ import annotations

from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat, PositiveFloat
from mmrl.config.registry import penalty
from mmrl.core.step_table import Batch, StepOutput
from mmrl.objectives.fields import mean_square


@penalty(extra={"velocity"}, of_others={"velocity"})
def norm_hinge(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 1.0,
    against: str = "ref",
    factor: PositiveFloat = 1.1,
) -> Tensor:
    """Penalise velocities much longer than the reference's (NormGuard, arXiv 2606.27771).

    Our reading, since only the abstract is known: the excess of the root mean square over the latent's
    axes, not squared, and both constants.

    Args:
        coef: Weight of the penalty.
        against: Name of the reference policy.
        factor: Length, as a multiple of the reference's, above which the penalty begins.
    """
    # 1e-12: the gradient of the root is infinite at 0.
    length, bound = (
        (mean_square(output.extra["velocity"]) + 1e-12).sqrt() for output in (new, batch.by(against, new))
    )
    return (coef * (length - factor * bound).clamp(min=0)).to(new.logp.dtype)
