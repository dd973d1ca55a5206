"""LLDS (arXiv 2512.04220): a penalty on lost likelihood of good answers.

Title: On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral
Formula: coef max(0, log old - log new), where A >= 0 and the part of a step lost likelihood as a whole.
Our reading: a part is a stretch without holes in the mask.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeFloat
from mmrl.config.registry import penalty
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.types import Unit
from mmrl.objectives.surrogates import step_ratio


@penalty(unit=Unit.ROW)
def lost_likelihood(
    new: StepOutput,
    batch: Batch,
    *,
    coef: NonNegativeFloat = 0.2,
    gate: Literal["action", "response"] = "action",
    answer_coef: NonNegativeFloat | None = None,
    against: str = "old",
) -> Tensor:
    """Keep good answers likely: penalise falls max(0, log old - log new) (LLDS, arXiv 2512.04220).

    Only steps whose advantage is at least 0 count, and only where the log-probability of their part fell as
    a whole. It is felt from the second update of a collection.

    Args:
        coef: Weight of the penalty, the paper's lambda.
        gate: A part is a stretch without holes in the mask, such as the text between two tool results
            (`action`), or the whole answer (`response`).
        answer_coef: Weight of the final answer's steps, where it is below `coef`: 0 protects the other steps
            alone. The engine `vision.with_answer_region` notes which they are. Null: that of all steps.
        against: Policy that sampled.
    """
    kept = (batch.mask > 0) & (batch.advantage >= 0)
    lost = torch.where(kept, -step_ratio(new, batch, against=against), 0.0)
    part = torch.zeros_like(kept, dtype=torch.int64)
    if gate == "action":  # a part begins where the step before is not kept
        part = (kept & ~kept.roll(1, 1).index_fill(1, part.new_zeros(1), False)).cumsum(1)
    sums = lost.new_zeros(len(lost), lost.shape[1] + 1).scatter_add(1, part, lost.detach())
    weight = torch.full_like(lost, coef)
    if answer_coef is not None and kept.any():  # a process without rows has no notes
        if "answer" not in batch.notes:
            raise ValueError(
                "`answer_coef` of lost_likelihood reads the note `answer`; add the engine "
                "`vision.with_answer_region`, or leave it out"
            )
        weight = weight.masked_fill(batch.notes["answer"] == 1, min(answer_coef, coef))
    return weight * torch.where(sums.gather(1, part) > 0, lost.clamp(min=0), 0.0)
