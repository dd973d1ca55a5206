"""Reg-GRPO: the regression of log-ratios on advantages, its identities and its first gradient."""

from __future__ import annotations

import math

import pytest
import torch

from mmrl.advantages.normalize import group_normalize
from mmrl.papers.reg_grpo import regression
from tests.objectives.test_compare import gained, shown, slope
from tests.objectives.test_comparison import comparison, told
from tests.support.tables import loss_of, reward_table, slope_of, step_table

TINY = 1e-12
REWARDS = [0.9, 0.1, 0.4, 0.6, 0.0]
RHO = [0.3, -0.2, 0.25, -0.4, 0.1]
REG = {"implicit_reward": {"name": "log_ratio", "against": "old"}, "compare": [{"name": "regression"}]}


def normalized(rewards):
    """Normalise rewards as the variant's chain does."""
    return group_normalize(reward_table(rewards), std="population", eps=0.0).values[:, 0, 0].tolist()


def cost(rho, rewards=REWARDS, **options):
    """Give the loss of one group with one step a row."""
    implicit_reward, batch = gained([[value] for value in rho], normalized(rewards))
    return regression(implicit_reward, batch, **{"delta": TINY, **options}).item()


def correlation(x, y):
    return torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()


def test_the_loss_is_twice_one_minus_the_correlation():
    assert cost(RHO) == pytest.approx(2 * (1 - correlation(REWARDS, RHO)), abs=1e-9)
    assert 0 < cost(RHO) < 4


def test_it_is_0_where_log_ratios_are_rewards_up_to_scale_and_shift_and_4_where_they_are_opposite():
    assert cost([3 * r - 7 for r in REWARDS]) == pytest.approx(0, abs=1e-9)
    assert cost([-3 * r + 7 for r in REWARDS]) == pytest.approx(4, abs=1e-9)


@pytest.mark.parametrize("scale, shift", [(10.0, 0.0), (0.1, 0.0), (1.0, 40.0), (5.0, -40.0)])
def test_it_does_not_depend_on_scale_and_shift_of_the_log_ratios(scale, shift):
    assert cost([scale * r + shift for r in RHO]) == pytest.approx(cost(RHO), abs=1e-8)


@pytest.mark.parametrize("delta", [1e-2, 1e-4])
@pytest.mark.parametrize("detach_sigma", [False, True])
def test_where_nothing_moved_the_gradient_is_that_of_the_policy_gradient_times_a_constant(
    delta, detach_sigma
):
    advantage = normalized(REWARDS)
    implicit_reward, batch = gained([[0.0, 0.0]] * 5, advantage)
    loss = regression(implicit_reward, batch, delta=delta, detach_sigma=detach_sigma)
    shown(loss, 1.0)  # the mean of A^2
    wanted = -2 * torch.tensor(advantage, dtype=torch.float64) / (5 * math.sqrt(delta))
    found = slope(loss, implicit_reward)
    torch.testing.assert_close(found, wanted[:, None].expand(5, 2), rtol=1e-12, atol=1e-14)


def test_the_step_of_the_variant_is_20_times_that_of_grpo_on_policy():
    """2 / sqrt(0.01) = 20; the same direction, summed over steps and not averaged."""
    advantage = normalized(REWARDS)
    new, batch = step_table([[-1.0]] * 5, advantage=advantage, old=[[-1.0]] * 5)
    one = slope_of(told(new, batch, **REG)[0], new)
    two = slope_of(loss_of(new, batch, surrogate="clip", aggregation="sequence_mean"), new)
    torch.testing.assert_close(one, 20 * two, rtol=1e-12, atol=1e-14)


def test_its_gradient_is_what_autograd_says_of_the_formula():
    advantage = torch.tensor(normalized(REWARDS), dtype=torch.float64)
    for detach_sigma in (False, True):
        rho = torch.tensor(RHO, dtype=torch.float64, requires_grad=True)
        sigma = (rho.var(unbiased=False) + 0.01).sqrt()
        sigma = sigma.detach() if detach_sigma else sigma
        (wanted,) = torch.autograd.grad((advantage - (rho - rho.mean()) / sigma).square().mean(), rho)
        implicit_reward, batch = gained([[value] for value in RHO], advantage.tolist())
        found = slope(regression(implicit_reward, batch, detach_sigma=detach_sigma), implicit_reward)
        torch.testing.assert_close(found[:, 0], wanted, rtol=1e-10, atol=1e-12)
    assert not found.isnan().any()


def test_log_ratios_are_summed_over_a_row_and_averaged_where_the_implicit_reward_is_a_mean():
    logp = [[-1.0] * n for n in (1, 2, 4)]
    old = [[-1.0 - gap] * n for n, gap in ((1, 0.3), (2, 0.2), (4, 0.15))]
    advantage = normalized([0.2, 0.9, 0.1])
    new, batch = step_table(logp, advantage=advantage, old=old)
    for name, rho in (("log_ratio", [0.3, 0.4, 0.6]), ("mean_log_ratio", [0.3, 0.2, 0.15])):
        loss, _ = told(new, batch, **{**REG, "implicit_reward": {"name": name, "against": "old"}})
        assert loss.item() == pytest.approx(cost(rho, [0.2, 0.9, 0.1], delta=1e-2), abs=1e-9)


def test_of_two_rows_only_the_order_is_learned():
    assert cost([0.7, -0.1], [1.0, 0.0]) == pytest.approx(0, abs=1e-8)
    assert cost([-0.1, 0.7], [1.0, 0.0]) == pytest.approx(4, abs=1e-8)
    implicit_reward, batch = gained([[0.7], [-0.1]], normalized([1.0, 0.0]))
    assert slope(regression(implicit_reward, batch, delta=TINY), implicit_reward).abs().max() < 1e-8
    implicit_reward, batch = gained([[0.0], [0.0]], normalized([1.0, 0.0]))  # at the singularity it is not
    assert slope(regression(implicit_reward, batch), implicit_reward).flatten().tolist() == pytest.approx(
        [-10.0, 10.0]
    )


def test_groups_of_equal_rewards_and_of_one_row_cost_nothing_and_count():
    rewards = [0.5, 0.5, 0.5, 0.9, 0.1, 0.4, 0.7]
    advantage = [*normalized(rewards[:3]), *normalized(rewards[3:6]), 0.0]
    implicit_reward, batch = gained(
        [[0.3], [0.1], [0.2], [0.2], [0.1], [0.5], [3.0]], advantage, group=[0, 0, 0, 1, 1, 1, 2]
    )
    loss = regression(implicit_reward, batch)
    assert loss.item() == pytest.approx(cost([0.2, 0.1, 0.5], rewards[3:6], delta=1e-2) / 3)
    moved = slope(loss, implicit_reward)[:, 0] != 0
    assert moved.tolist() == [False] * 3 + [True] * 3 + [False]


def test_a_row_that_is_not_learned_from_takes_no_part():
    whole, batch = gained([[9.0], [0.2], [0.1], [0.5]], [0.0, 1.0, -1.0, 0.5], mask=[[0], [1], [1], [1]])
    part, rest = gained([[0.2], [0.1], [0.5]], [1.0, -1.0, 0.5])
    loss = regression(whole, batch)
    assert loss.item() == pytest.approx(regression(part, rest).item())
    assert slope(loss, whole)[0].item() == 0


@pytest.mark.parametrize("size", [50.0, 1000.0])
def test_far_log_ratios_stay_finite(size):
    implicit_reward, batch = gained([[size], [-size], [size / 2]], normalized([0.2, 0.9, 0.1]))
    loss = regression(implicit_reward, batch)
    assert 0 <= loss.item() <= 4
    assert slope(loss, implicit_reward).isfinite().all()


def test_a_kl_penalty_is_added():
    new, batch = step_table(
        [[-1.0], [-2.0], [-1.5]], advantage=normalized([0.2, 0.9, 0.1]),
        old=[[-1.2], [-1.9], [-1.5]], ref=[[-1.5], [-1.5], [-1.5]],
    )  # fmt: skip
    plain, penalty = told(new, batch, **REG)[0], [{"name": "k3", "coef": 0.1}]
    with_kl = told(new, batch, **REG, penalty=penalty, aggregation="sequence_mean")[0]
    gaps = [0.5, -0.5, 0.0]  # k3 = exp(-d) + d - 1
    assert (with_kl - plain).item() == pytest.approx(0.1 * sum(math.exp(-d) + d - 1 for d in gaps) / 3)
    assert set(comparison(**REG, penalty=penalty).needs.others) == {"ref"}
