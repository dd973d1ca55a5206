"""CAPO (arXiv 2510.00819): drop steps that would change the policy or the objective too much.

Title: Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning
Formula: keep where m_F = lr^2 / 2 (v u)^2 < max_fisher and |m_H| < max_hessian, v = e_a - p, u = A |h|^2 v.
Our reading: the model moves along the plain gradient and not along Adam's moments, with a largest share of
dropped steps.
"""

from __future__ import annotations

import torch

from mmrl.advantages.notes import noted
from mmrl.advantages.select import per_step
from mmrl.config.ranges import NonNegativeFloat, PositiveFloat, Probability
from mmrl.config.registry import advantage
from mmrl.core.reward_table import RewardTable


@advantage(others={"old"}, of_others={"hidden_sq_norm", "sum_p2", "sum_p3"})
def curvature(
    table: RewardTable,
    *,
    learning_rate: NonNegativeFloat = 1.5e-5,
    max_fisher: PositiveFloat = 1e-4,
    max_hessian: PositiveFloat = 1e-2,
    one_sided: bool = False,
    max_share: Probability = 1.0,
) -> RewardTable:
    """Drop steps whose gradient would move the policy or the objective too far (CAPO, arXiv 2510.00819).

    A second-order model of the last layer, with v = e_a - p for the sampled token a, h the last hidden state
    and the plain gradient step u = A |h|^2 v: m_F = lr^2 / 2 (v u)^2 and m_H = lr A^2 |v|^2 |h|^2 + lr^2 / 2
    A ((v u)^2 - u' (diag p - p p') u). A step stays where m_F < max_fisher and |m_H| < max_hessian; the
    others leave every denominator. Put it last. Our readings: this is the paper's plain form, and sums are
    over the whole vocabulary. Its full form steps along Adam's moments of the last layer's gradient, which
    are left out: they belong to the optimizer and not to the rows, they have the size of the head for every
    step, and where the head is frozen, as beside an adapter, there are none.

    The plain form expects far more than a step of Adam does, which goes along the mean gradient of many
    tokens: m_H is 0.03 to 0.06 for every uncertain token of a model whose |h|^2 is 3000, so that the paper's
    bounds alone would leave tokens that the model is sure of, and nothing to learn. `max_share` prevents
    that.

    Args:
        learning_rate: Step size of the model; the paper's, or the run's own schedule.
        max_fisher: Bound on the change of the policy; the paper's for GRPO (Dr. GRPO: 1e-3).
        max_hessian: Bound on the change of the objective; the paper's for GRPO (Dr. GRPO: 5e-4).
        one_sided: Drop steps with m_H < 0 as well.
        max_share: Largest share of the collection's steps that are dropped, those furthest beyond a bound.
            The paper reports less than 0.08; our reading is that it holds as a limit.
    """
    table = per_step(table)
    p, norm = noted(table, "old/logp").exp(), noted(table, "old/hidden_sq_norm")
    p2, p3 = noted(table, "old/sum_p2"), noted(table, "old/sum_p3")
    squared = (1 - 2 * p + p2)[:, None]  # |v|^2
    # v' (diag p - p p') v: sum_j p_j v_j^2 - (sum_j p_j v_j)^2
    spread = (p - 2 * p.square() + p3 - (p - p2).square())[:, None]
    a, norm = table.values, norm[:, None]
    along = a * norm * squared  # v u
    fisher = learning_rate**2 / 2 * along.square()
    hessian = learning_rate * a.square() * squared * norm
    hessian = hessian + learning_rate**2 / 2 * a * (along.square() - (a * norm).square() * spread)
    excess = torch.maximum(fisher / max_fisher, hessian.abs() / max_hessian)
    far = excess >= 1  # False for NaN: nothing is known
    if one_sided:
        far |= hessian < 0
    far = far & table.valid
    excess = torch.where(far, excess, 0.0).amax(1)  # (N, T)
    most = int(max_share * int(table.valid.any(1).sum()))
    furthest = torch.zeros_like(far[:, 0]).flatten()
    furthest[excess.flatten().argsort(descending=True, stable=True)[:most]] = True
    return table.replace(learn=table.learn & ~(far.any(1) & furthest.view_as(excess)))
