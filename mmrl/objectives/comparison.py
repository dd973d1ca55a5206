"""The objective that compares rows of a group by their implicit rewards (DPO, KTO and others)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mmrl.config.binding import Bound
from mmrl.config.plain import as_list
from mmrl.config.ranges import PositiveFloat, Probability
from mmrl.config.registry import Needs, implicit_reward, objective
from mmrl.config.schema import Piece
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import group_extreme, group_index, group_mean, group_sum, masked_mean
from mmrl.core.types import Unit
from mmrl.objectives.policy_gradient import needs_of

# ---- implicit rewards of steps, (N, T); comparisons sum them over the steps of a row


def row_share(batch: Batch) -> Tensor:
    """Return 1 / number of steps of each row: (N, 1)."""
    return 1.0 / batch.mask.sum(-1, keepdim=True).clamp(min=1)


@implicit_reward
def log_ratio(new: StepOutput, batch: Batch, *, against: str = "ref") -> Tensor:
    """DPO's implicit reward without beta: the log-ratio to another policy (arXiv 2305.18290)."""
    return new.logp - batch.by(against, new).logp


@implicit_reward
def logp(new: StepOutput, batch: Batch) -> Tensor:
    """Log-probability: an implicit reward without a reference (SLiC, arXiv 2305.10425; CPO, 2401.08417)."""
    return new.logp


@implicit_reward(unit=Unit.ROW)
def mean_log_ratio(new: StepOutput, batch: Batch, *, against: str = "ref") -> Tensor:
    """Log-ratio to another policy, divided by the row's number of steps (TRL's `sigmoid_norm`)."""
    return (new.logp - batch.by(against, new).logp) * row_share(batch)


@implicit_reward(unit=Unit.ROW)
def mean_logp(new: StepOutput, batch: Batch) -> Tensor:
    """Log-probability, divided by the row's number of steps (SimPO, arXiv 2405.14734).

    The sum over a row is the mean log-probability, which is also DisCO's score (arXiv 2505.12366).
    """
    return new.logp * row_share(batch)


@implicit_reward(unit=Unit.GROUP)
def ld_log_ratio(
    new: StepOutput, batch: Batch, *, ld_alpha: Probability = 0.5, against: str = "ref"
) -> Tensor:
    """Log-ratio with less weight on steps beyond the group's shortest row (LD-DPO, arXiv 2409.06411).

    Args:
        ld_alpha: Weight of these steps (TRL's `ld_alpha`). 1: as in `log_ratio`. 0: ignore them.
        against: Name of the other policy.
    """
    place, length = batch.mask.cumsum(-1), batch.mask.sum(-1)
    index = group_index([batch.group])
    shared = group_extreme(length, index, length > 0, largest=False)[:, None]
    gap = new.logp - batch.by(against, new).logp
    return torch.where(place > shared, ld_alpha * gap, gap)  # keeps the dtype of `gap`


@implicit_reward(unit=Unit.ROW)
def f_divergence(
    new: StepOutput,
    batch: Batch,
    *,
    divergence: Literal["forward_kl", "js", "alpha"] = "forward_kl",
    alpha: PositiveFloat = 0.5,
    against: str = "ref",
) -> Tensor:
    """Implicit reward f'(ratio) for another divergence than the reverse KL (f-DPO, arXiv 2309.16240).

    u is the ratio of the whole row; f'(u) is divided equally among its steps. The reverse KL, f' = log u, is
    `log_ratio`. Exponents are clamped to at most 20.

    Args:
        divergence: f'(u), TRL's `f_divergence_type`. `forward_kl`: 1 - 1 / u. `js`: log(2 u / (1 + u)).
            `alpha`: (u^(alpha - 1) - 1) / (alpha - 1).
        alpha: Order of `alpha`, above 0; 1 is the reverse KL (TRL's `f_alpha_divergence_coef`).
        against: Name of the other policy.
    """
    gap = ((new.logp - batch.by(against, new).logp) * batch.mask).sum(-1, keepdim=True)
    order = {"forward_kl": 0.0, "alpha": alpha}.get(divergence, 1.0) - 1  # forward KL is alpha = 0
    if divergence == "js":
        value = math.log(2) + logsigmoid(gap)
    else:
        value = torch.expm1((order * gap).clamp(max=20.0)) / order if order else gap
    return value * row_share(batch) * batch.mask


@objective
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Loss that compares the rows of each group by their implicit rewards, plus penalties over all steps.

    The implicit reward of a row is the sum of its steps' implicit rewards. A pair is a group with the
    advantages 1 and -1. Metrics have TRL's names; reported rewards are implicit rewards times the beta of the
    first comparison. Comparisons can read the detached output of the policy as `batch.others["new"]`.

    Args:
        implicit_reward: Implicit reward of a step, such as the log-ratio to the reference.
        compare: Comparisons, summed; each may have a `weight`.
        penalty: Per-step penalties, added to the loss.
        aggregation: Weights of steps in the penalties only.
    """

    implicit_reward: Callable
    compare: tuple[Callable, ...]
    penalty: tuple[Callable, ...] = ()
    aggregation: Callable = Piece("sequence_mean")

    @property
    def needs(self) -> Needs:
        """The combined requirements of the pieces in the options, such as outputs of a reference."""
        return needs_of(self.implicit_reward, self.compare, self.penalty, self.aggregation)

    def weigh(self, batch: Batch) -> Tensor:
        """Return the weight (N, T) of every step in the penalties; the weighted sum is added to the loss."""
        return self.aggregation(batch)

    def __call__(self, new: StepOutput, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the contributions of a micro-batch of whole groups to loss and metrics of the update."""
        implicit_reward = self.implicit_reward(new, batch) * batch.mask
        seen = batch.replace(others={**batch.others, "new": new.detach()})
        loss = sum(compare.weight * compare(implicit_reward, seen) for compare in as_list(self.compare))
        for penalty in as_list(self.penalty):
            loss = loss + (penalty(new, batch) * batch.weight).sum()  # comparisons are already normalised
        return loss, diagnose_groups(_beta(as_list(self.compare)[0]) * implicit_reward, batch)


def _beta(compare: Bound) -> float:
    """Return the option `beta` of a comparison, or of the comparison that it wraps; 1 if there is none."""
    options = {name: option.default for name, option in compare.entry.options.items()} | compare.options
    return _beta(options["compare"]) if "compare" in options else options.get("beta", 1.0)


@torch.no_grad()
def diagnose_groups(reward: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Compute mean rewards of chosen and rejected rows, their margin and accuracy, from rewards (N, T).

    Chosen rows have an advantage above the mean of their group. A margin may grow while both means fall, so
    both are reported. Rows with the note `unrelated` are reported separately. Accuracy is the fraction of
    groups whose chosen rows have the larger reward.
    """
    groups = batch.totals.groups or 1.0
    index = group_index([batch.group])
    counted = batch.mask.sum(-1) > 0
    merit = masked_mean(batch.advantage, batch.mask, -1)
    unrelated = counted & (batch.notes.get("unrelated", torch.zeros_like(batch.mask)) > 0).any(-1)
    related = counted & ~unrelated
    merit = torch.where(related, merit - group_mean(merit, index, related), 0.0)
    total = reward.sum(-1)

    def mean_of(rows: Tensor) -> Tensor:
        """Average the rewards of the selected rows of each group, then over the groups of the update."""
        rows = rows.to(total.dtype)
        return (group_sum(total * rows, index) / group_sum(rows, index).clamp(min=1)).sum() / groups

    chosen, rejected = mean_of(merit > 0), mean_of(merit < 0)
    agrees = group_sum(merit * total, index) > 0  # covariance; for a pair: chosen above rejected
    metrics = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected}
    metrics["accuracies"] = agrees.to(total.dtype).sum() / groups
    if "unrelated" in batch.notes:
        metrics["unrelated"] = mean_of(unrelated)
    return {f"rewards/{name}": value for name, value in metrics.items()}
