"""What reads the fields of a flow policy: divergences, anchors, DiffusionNFT, GRPO-Guard."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.registry import find
from mmrl.core.step_table import Batch, StepOutput
from mmrl.objectives.fields import by_step_size, diffusion_nft, gaussian_kl, grpo_guard_ratio, velocity_mse
from mmrl.objectives.surrogates import clip, step_ratio
from tests.support.tables import ListedSteps, assert_rows, loss_of


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def said(logp=None, **fields):
    """Say fields from nested lists; log-probabilities are 0 unless given, and have the shape of the steps."""
    extra = {name: tensor(value) for name, value in fields.items()}
    first = next(iter(extra.values()))
    return StepOutput(
        torch.zeros(first.shape[:2], dtype=torch.float64) if logp is None else tensor(logp), extra
    )


def batch_of(new, *, advantage=0.0, mask=None, **others):
    shape = new.logp.shape
    counted = torch.ones(shape, dtype=torch.float64) if mask is None else tensor(mask)
    group = torch.zeros(shape[0], dtype=torch.int64)
    steps = ListedSteps(torch.arange(shape[0]), torch.arange(shape[1]), group)
    batch = Batch.of(steps, counted, {}).replace(group=group, others=others)
    batch = batch.replace(advantage=tensor(advantage).expand(shape) * counted)
    return batch.replace(totals=batch.count())


# ---- gaussian_kl

NEAR = {"std": [[0.5, 0.2]], "dt": [[-0.25, -0.04]]}
MEANS = [[[1.0, 2.0], [0.0, 0.3]]]
OTHER = [[[1.0, 1.0], [0.0, 0.0]]]


def test_gaussian_kl_divides_by_the_noise_per_root_of_time():
    # distances 1/2 and .045; s = .5 / .5 = 1 and .2 / .2 = 1: halves of them
    new = said(mean=MEANS, **NEAR)
    batch = batch_of(new, ref=said(mean=OTHER))
    assert_rows(gaussian_kl(new, batch, coef=1.0), [[0.25, 0.0225]])
    # with dt the divisor is 2 std^2: .5 and .08
    assert_rows(gaussian_kl(new, batch, coef=1.0, kl_dt=True), [[1.0, 0.5625]])


def test_the_two_forms_of_gaussian_kl_differ_by_the_step_of_time():
    new = said(mean=MEANS, **NEAR)
    batch = batch_of(new, ref=said(mean=OTHER))
    plain, timed = (gaussian_kl(new, batch, kl_dt=kl_dt) for kl_dt in (False, True))
    assert_rows(plain / timed, [[0.25, 0.04]])  # -dt; at 10 steps about 1/10, as .04 to .004


def test_gaussian_kl_is_the_divergence_of_two_normals_per_dimension():
    new = said(mean=MEANS, **NEAR)
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(tensor(MEANS), tensor(NEAR["std"])[..., None]),
        torch.distributions.Normal(tensor(OTHER), tensor(NEAR["std"])[..., None]),
    ).mean(-1)
    batch = batch_of(new, ema=said(mean=OTHER))
    found = gaussian_kl(new, batch, coef=2.0, kl_dt=True, against="ema")
    torch.testing.assert_close(found, 2 * wanted)


def test_gaussian_kl_is_finite_after_the_end_of_a_row():
    # what is not counted may hold zeros
    new = said(mean=[[[1.0], [0.0]]], std=[[1.0, 0.0]], dt=[[-0.1, 0.0]])
    new.extra["mean"].requires_grad_()
    loss = gaussian_kl(new, batch_of(new, ref=said(mean=[[[0.0], [0.0]]]), mask=[[1, 0]]))
    loss.sum().backward()
    assert loss.isfinite().all() and new.extra["mean"].grad.isfinite().all()
    assert loss[0, 1] == 0


# ---- velocity_mse


def test_velocity_mse_is_a_mean_square_distance():
    # (.2^2 + .3^2) / 2
    new = said(velocity=[[[0.5, -0.1]]], time=[[0.5]])
    batch = batch_of(new, ref=said(velocity=[[[0.7, -0.4]]]), ema=said(velocity=[[[0.5, -0.1]]]))
    assert_rows(velocity_mse(new, batch, coef=1.0), [[0.065]])
    assert_rows(velocity_mse(new, batch, coef=1e-4), [[6.5e-6]], tolerance=1e-12)
    assert velocity_mse(new, batch, against="ema") == 0


def test_velocity_mse_weighs_by_the_noise_of_the_step():
    # 2 s^2 = 2 * .49 * t / (1 - t): .98 at t = 1/2; at t = 1 the divisor's t is .99, so 98
    new = said(velocity=[[[1.0], [1.0]]], time=[[0.5, 1.0]])
    batch = batch_of(new, ref=said(velocity=[[[0.0], [0.0]]]))
    assert_rows(velocity_mse(new, batch, coef=1.0, weighting="elbo"), [[1 / 0.98, 1 / 98]])


def test_velocity_mse_averages_over_every_axis_of_the_latent():
    new = said(velocity=[[[[1.0, 3.0], [1.0, 1.0]]]], time=[[0.5]])
    batch = batch_of(new, ref=said(velocity=[[[[1.0, 1.0], [1.0, 1.0]]]]))
    assert_rows(velocity_mse(new, batch, coef=1.0), [[1.0]])


# ---- diffusion_nft

NFT = {"velocity": [[[0.5, -0.1]]], "target": [[[0.6, -0.3]]], "time": [[0.5]]}
OLD = [[[0.7, -0.4]]]


def nft(advantage, *, beta=1.0, adv_mode="all", **changes):
    new = said(**{**NFT, **changes})
    batch = batch_of(new, advantage=advantage, old=said(velocity=OLD))
    return diffusion_nft(torch.zeros(1, 1), new, batch, beta=beta, adv_mode=adv_mode)


def test_negative_aware_has_its_worked_values():
    # r = .54; with v- = (.9, -.7): 5 (.54 * .0833333 + .46 * .1785714)
    assert_rows(nft(0.4), [[5 * (0.54 * 0.0833333 + 0.46 * 0.1785714)]])
    assert_rows(nft(0.4) + 6.5e-6, [[0.6357208]])
    assert_rows(nft(0.4, beta=0.1), [[5 * (0.54 * 0.0376667 + 0.46 * 0.0626) / 0.1]], tolerance=5e-6)
    assert_rows(nft(0.4, beta=0.1) + 6.5e-6, [[2.4568065]])


@pytest.mark.parametrize("advantage, share", [(-7, 0.0), (-2.5, 0.25), (0.4, 0.54), (6, 1.0)])
def test_the_share_of_the_good_branch_follows_the_advantage(advantage, share):
    good, bad = nft(50.0), nft(-50.0)
    assert_rows(nft(float(advantage)), (share * good + (1 - share) * bad).tolist())


@pytest.mark.parametrize(
    "adv_mode, shares",
    [
        # of the advantages -7, -2.5, 0, .4 and 6; 1/2 + 1/10 is .6
        ("positive_only", [0.5, 0.5, 0.5, 0.54, 1.0]),
        ("negative_only", [0.0, 0.25, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_the_modes_of_the_released_code_bend_the_advantage(adv_mode, shares):
    good, bad = nft(50.0), nft(-50.0)
    for advantage, share in zip([-7.0, -2.5, 0.0, 0.4, 6.0], shares, strict=True):
        wanted = share * good + (1 - share) * bad
        assert_rows(nft(advantage, adv_mode=adv_mode), wanted.tolist(), tolerance=1e-12)


def test_the_distance_is_that_of_the_clean_image():
    # x0 = (.4, -.2), eps = (1, -.5), t = .5: x_t = (.7, -.35), x_t - t v = (.45, -.3), away by .05 and -.1
    away = tensor([0.45 - 0.4, -0.3 + 0.2])
    assert_rows(nft(50.0), [[5 * float(away.square().mean() / away.abs().mean())]])


@pytest.mark.parametrize("advantage", [1.5, -2.0, 0.0])
def test_at_the_policy_that_rolled_out_nft_matches_weighted_by_the_advantage(advantage):
    # both branches coincide: the slope is A t^2 grad d / w, w the mean absolute distance of the images
    new = said(**NFT)
    velocity = new.extra["velocity"].requires_grad_()
    batch = batch_of(new, advantage=advantage)
    (slope,) = torch.autograd.grad(diffusion_nft(torch.zeros(1, 1), new, batch, beta=0.3).sum(), velocity)
    leaf = tensor(NFT["velocity"]).requires_grad_()
    away = leaf - tensor(NFT["target"])
    norm = 0.5 * away.detach().abs().mean()
    (matching,) = torch.autograd.grad(advantage * 0.5**2 * away.square().mean() / norm, leaf)
    torch.testing.assert_close(slope, matching)
    assert slope.any() or not advantage


def test_a_perfect_match_is_normalised_by_no_less_than_1e_5():
    new = said(velocity=[[[0.6, -0.3]]], target=[[[0.6, -0.3]]], time=[[0.5]])
    new.extra["velocity"].requires_grad_()
    loss = diffusion_nft(torch.zeros(1, 1), new, batch_of(new, advantage=3.0))
    loss.sum().backward()
    assert loss == 0 and not new.extra["velocity"].grad.any()


def test_a_near_match_is_divided_by_1e_5():
    # away by 1e-6 at time 1: 1e-12 / 1e-5, times 5
    new = said(velocity=[[[0.6 + 1e-6]]], target=[[[0.6]]], time=[[1.0]])
    loss = diffusion_nft(torch.zeros(1, 1), new, batch_of(new, advantage=5.0))
    assert_rows(loss, [[5e-7]], tolerance=1e-12)


def test_negative_aware_measures_every_step_of_every_row_alone():
    # latents of two axes; a step alone costs what it costs among others
    generator = torch.Generator().manual_seed(2)
    fields = {name: torch.rand(2, 3, 2, 2, generator=generator).tolist() for name in ("velocity", "target")}
    old, time = torch.rand(2, 3, 2, 2, generator=generator).tolist(), [[0.1, 0.5, 0.9], [0.3, 0.2, 1.0]]
    new = said(**fields, time=time)
    together = diffusion_nft(new.logp, new, batch_of(new, advantage=2.0, old=said(velocity=old)))
    for row in range(2):
        for step in range(3):
            one = said(**{k: [[v[row][step]]] for k, v in fields.items()}, time=[[time[row][step]]])
            other = said(velocity=[[old[row][step]]])
            alone = diffusion_nft(one.logp, one, batch_of(one, advantage=2.0, old=other))
            assert_rows(alone, [[together[row, step].item()]], tolerance=1e-12)


def test_fields_may_be_numbers():
    new = said(velocity=[[0.5, 1.0]], time=[[0.5, 0.5]])
    batch = batch_of(new, ref=said(velocity=[[0.0, 0.0]]))
    assert_rows(velocity_mse(new, batch, coef=1.0), [[0.25, 1.0]])


def test_negative_aware_needs_velocities_of_the_policy_that_rolled_out():
    new = said(**NFT)
    batch = batch_of(new, advantage=2.0, old=said(velocity=OLD), ema=said(velocity=[[[0.0, 0.0]]]))
    one, other = (diffusion_nft(new.logp, new, batch, against=name) for name in ("old", "ema"))
    assert (one - other).abs() > 1e-3


# ---- grpo_guard_ratio


def stepped(new_mean, old_mean, std, taken):
    """Say two Gaussian steps of one deviation and their log-densities at what was taken (means over
    dimensions)."""

    def density(mean):
        wide = tensor(std)[..., None]
        return (-((tensor(taken) - tensor(mean)) ** 2) / (2 * wide**2) - wide.log()).mean(-1)

    old = StepOutput(density(old_mean), {"mean": tensor(old_mean)})
    return StepOutput(density(new_mean), {"mean": tensor(new_mean), "std": tensor(std)}), old


def test_guarded_ratio_agrees_with_both_published_forms():
    new, old = stepped([[[0.3, 0.1]]], [[[0.1, 0.0]]], [[0.5]], [[[0.4, 0.6]]])
    gap, ratio, scale = 0.025, (new.logp - old.logp), 0.5
    found = grpo_guard_ratio(new, batch_of(new, old=old))
    # A: ratio * scale + gap / (2 scale); B: (ratio + gap / (2 scale^2)) * scale
    assert_rows(found, (ratio * scale + gap / (2 * scale)).tolist())
    assert_rows(found, ((ratio + gap / (2 * scale**2)) * scale).tolist())


def test_a_guarded_ratio_has_mean_0_under_the_policy_that_rolled_out():
    # the noise z = +-1 is as wide as a unit normal: the mean of both is that over the normal
    old, new, std = 0.2, 0.5, 0.4
    ratios, guarded = [], []
    for z in (1.0, -1.0):
        one, other = stepped([[[new]]], [[[old]]], [[std]], [[[old + std * z]]])
        batch = batch_of(one, old=other)
        ratios.append(float(step_ratio(one, batch)))
        guarded.append(float(grpo_guard_ratio(one, batch)))
    assert sum(ratios) / 2 == pytest.approx(-(0.3**2) / (2 * 0.4**2))
    assert sum(guarded) / 2 == pytest.approx(0.0, abs=1e-12)
    # what is left is z (new - old), whatever the deviation of the step
    assert guarded[0] == pytest.approx(0.3)


def test_guarded_ratio_is_0_on_policy_and_after_the_end_of_a_row():
    new, _ = stepped([[[0.3], [0.1]]], [[[0.1], [0.0]]], [[0.5, 0.0]], [[[0.4], [0.6]]])
    new = StepOutput(tensor([[-1.0, 0.0]]), new.extra)
    batch = batch_of(new, mask=[[1, 0]])
    assert not grpo_guard_ratio(new, batch).any()
    far = StepOutput(tensor([[-1.0, 50.0]]), {"mean": tensor([[[0.3], [9.0]]])})
    assert not grpo_guard_ratio(new, batch.replace(others={"old": far})).any()


def test_guarded_ratio_stays_finite_under_the_clip():
    new, old = stepped([[[50.0]]], [[[-50.0]]], [[0.01]], [[[0.0]]])
    batch = batch_of(new, old=old, advantage=-1.0)
    new.extra["mean"].requires_grad_()
    loss = clip(grpo_guard_ratio(new, batch), new, batch)
    loss.sum().backward()
    assert loss.isfinite().all() and new.extra["mean"].grad.isfinite().all()


def test_by_step_size_divides_by_the_squared_mean_of_the_roots():
    # roots .5 and .1 have the mean .3; the third step is not counted; a row without steps weighs 1
    new = said(dt=[[-0.25, -0.01, -4.0], [0.0, 0.0, 0.0]])
    batch = batch_of(new, old=new, mask=[[1, 1, 0], [0, 0, 0]])
    assert_rows(by_step_size(batch), [[1 / 0.09] * 3, [1.0] * 3])


def test_the_second_form_of_grpo_guard_divides_the_first():
    new, old = stepped([[[0.3], [0.2]]], [[[0.1], [0.1]]], [[0.5, 0.4]], [[[0.4], [0.5]]])
    old = StepOutput(old.logp, {**old.extra, "dt": tensor([[-0.25, -0.01]])})
    batch = batch_of(new, old=old, advantage=1.0)
    form = {"ratio": "grpo_guard_ratio", "surrogate": "clip", "aggregation": "step_mean"}
    first, second = (
        loss_of(new, batch, **form, step_weight=step_weight) for step_weight in ((), "by_step_size")
    )
    assert_rows(second[None], [float(first / 0.09)])


# ---- what they ask for


@pytest.mark.parametrize(
    "kind, name, against",
    [
        ("penalty", "gaussian_kl", "ref"),
        ("penalty", "velocity_mse", "ref"),
        ("surrogate", "diffusion_nft", "old"),
        ("ratio", "grpo_guard_ratio", "old"),
    ],
)
def test_what_is_compared_is_asked_of_the_other_policy_too(kind, name, against):
    from mmrl.config.binding import Pieces
    from mmrl.config.schema import Piece
    from mmrl.core.rng import Stream

    field = "mean" if name in ("gaussian_kl", "grpo_guard_ratio") else "velocity"
    needs = Pieces(Stream()).make(kind, Piece(name)).needs
    assert dict(needs.others) == {against: {field}}
    assert field in needs.outputs
    other = Pieces(Stream()).make(kind, Piece(name, {"against": "ema"})).needs
    assert dict(other.others) == {"ema": {field}}
    assert find(kind, name).of_others == {field}


@pytest.mark.parametrize("piece", [gaussian_kl, velocity_mse])
def test_the_coefficient_multiplies_and_equal_policies_cost_nothing(piece):
    fields = {"mean": MEANS, "velocity": MEANS, "time": [[0.5, 0.2]], **NEAR}
    new, other = said(**fields), said(mean=OTHER, velocity=[[[0.1, 0.1], [0.0, 0.1]]])
    batch = batch_of(new, ref=other, ema=new)
    assert_rows(piece(new, batch, coef=3.0), (3 * piece(new, batch, coef=1.0)).tolist())
    assert piece(new, batch, coef=1.0).all()
    assert not piece(new, batch, coef=1.0, against="ema").any()


def test_arithmetic_is_in_float64_and_comes_back_in_the_precision_of_the_steps():
    # 1 + 1e-4 and 1 in float32: their squared distance is exact only after widening
    new, ref = (said(velocity=[[[value, 3.0]]], time=[[0.5]]) for value in (1.0001, 1.0))
    new, ref = (
        StepOutput(one.logp.float(), {k: v.float() for k, v in one.extra.items()}) for one in (new, ref)
    )
    found = velocity_mse(new, batch_of(new, ref=ref), coef=1.0)
    assert found.dtype == torch.float32
    gap = float(new.extra["velocity"][0, 0, 0].double() - 1.0)
    assert float(found) == pytest.approx(gap**2 / 2, rel=1e-6)
