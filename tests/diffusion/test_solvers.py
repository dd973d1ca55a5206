"""Arithmetic of the flow, and stochastic steps: worked numbers, densities, and the marginals they keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from mmrl.config.schema import ConfigError
from mmrl.diffusion import solvers
from mmrl.diffusion.flow_math import (
    Gaussian,
    along,
    clean_estimate,
    euler_step,
    heun_step,
    mean_dims,
    noise_estimate,
    noised,
)
from mmrl.diffusion.schedule import shift_times
from tests.diffusion.flows import SOLVERS, Normal, sd3_times, solver

TEN = sd3_times(10)
# s_t, what latents and velocities are multiplied by, and the deviation, for noise level .7 and 10 steps.
PUBLISHED = [
    (3.505672, 0.755000, -0.039871, 0.700000),
    (3.435074, 0.712541, -0.058242, 0.742964),
    (2.272635, 0.842633, -0.069293, 0.536154),
    (1.718500, 0.884093, -0.083818, 0.445897),
    (1.359202, 0.902891, -0.103447, 0.391794),
    (1.088093, 0.912011, -0.130884, 0.352797),
    (0.861175, 0.915464, -0.170907, 0.319071),
    (0.652438, 0.914464, -0.232600, 0.282007),
    (0.434415, 0.908672, -0.335054, 0.225361),
    (0.066443, 0.997793, -0.011117, 0.006278),
]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def step_at(name, i, latents, velocity, times=TEN, **options):
    """Take the step `i` of a schedule with a latent of one dimension."""
    given = (numbers(latents)[None], numbers(velocity)[None])
    return solver(name, **options)(*given, times[i : i + 1], times[i + 1 : i + 2], times[1])


# ---- the flow


def test_data_noise_and_velocity_are_three_views_of_one_point(generator):
    clean, noise = torch.randn(2, 3, 2, 4, 4, generator=generator, dtype=torch.float64)
    time = numbers(0.0, 0.3, 1.0)
    mixed, velocity = noised(clean, noise, time), noise - clean
    # at .3: .7 of the data and .3 of the noise
    assert_close(mixed[1], 0.7 * clean[1] + 0.3 * noise[1])
    assert_close(clean_estimate(mixed, velocity, time), clean)
    assert_close(noise_estimate(mixed, velocity, time), noise)
    # Along the true velocity a straight step is exact, whatever its length.
    assert_close(
        euler_step(mixed, velocity, time, numbers(1.0, 0.1, 0.4)), noised(clean, noise, numbers(1, 0.1, 0.4))
    )


def test_dimensions_are_averaged_after_the_kept_axes():
    values = torch.arange(12.0).view(2, 2, 3)
    assert_close(mean_dims(values), torch.tensor([2.5, 8.5]))
    assert_close(mean_dims(values, 2), torch.tensor([[1.0, 4.0], [7.0, 10.0]]))
    assert along(torch.tensor(0.5), values).shape == (1, 1, 1)


def test_heun_averages_the_velocities_at_both_ends():
    # v = x + t. From 1 at time 1 to time .5: v = 2, ahead 1 - .5 * 2 = 0, v there .5, mean 1.25, so 1 - .625.
    flow = lambda latents, time: latents + along(time, latents)
    one = numbers(1.0)
    found = heun_step(one, flow(one, one), one, 0.5 * one, flow)
    assert_close(found, numbers(0.375))
    # The step to time 0 is Euler's: 1 - 1 * 2.
    assert_close(heun_step(one, flow(one, one), one, 0 * one, flow), numbers(-1.0))
    # Where one row of several ends there, all take it.
    two, ends = numbers(1.0, 1.0), numbers(0.5, 0.0)
    assert_close(heun_step(two, flow(two, two), two, ends, flow), numbers(0.0, -1.0))


def follow(num_steps, move):
    """Follow the flow of normal data from (2,) noises to the data, in evenly spaced steps."""
    normal = Normal()
    times = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    latents = numbers(-1.0, 2.0)
    for here, there in zip(times[:-1], times[1:], strict=True):
        here, there = here.expand(2), there.expand(2)
        latents = move(latents, normal.velocity(latents, here), here, there, normal.velocity)
    return latents


@pytest.mark.parametrize(
    ("move", "order"), [(lambda x, v, t, to, flow: euler_step(x, v, t, to), 1), (heun_step, 2)]
)
def test_the_order_of_deterministic_steps(move, order):
    # The flow of normal data is a line: noise z becomes mean + std z.
    exact = 0.5 + 0.3 * numbers(-1.0, 2.0)
    errors = [(follow(num_steps, move) - exact).abs().max() for num_steps in (32, 64, 128)]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        # Halved steps leave 1/2 of the error of Euler's steps, 1/4 of that of Heun's.
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


# ---- densities


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (2, 2, 3, 4), (2, 2, 2, 3, 4)])
def test_the_density_is_the_mean_of_the_normal_one(shape, generator):
    mean, noise = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    std = numbers(0.2, 1.5)
    step = Gaussian(mean, std)
    drawn = step.draw(noise)
    assert_close((drawn - mean)[1], 1.5 * noise[1])
    exact = torch.distributions.Normal(mean, along(std, mean)).log_prob(drawn).reshape(2, -1).mean(-1)
    assert_close(step.logp(drawn), exact)
    assert_close(
        Gaussian(mean, std, normalized=False).logp(drawn), -(drawn - mean).square().reshape(2, -1).mean(-1)
    )


def test_the_gradient_goes_through_the_mean_alone():
    # d/dmean of -(x - m)^2 / (2 s^2) / 2 dimensions is (x - m) / (2 s^2): (1 / .5, -2 / .5) for s = .5
    mean, drawn = numbers(0.0, 0.0)[None].requires_grad_(), numbers(1.0, -2.0)[None].requires_grad_()
    Gaussian(mean, numbers(0.5)).logp(drawn).sum().backward()
    assert_close(mean.grad, numbers(2.0, -4.0)[None])
    assert drawn.grad is None


# ---- worked numbers


@pytest.mark.parametrize("i", range(10))
def test_the_published_steps_of_flow_sde(i):
    # A step is linear: latents 1 and velocity 0 show the one coefficient, 0 and 1 the other.
    of_latents, of_velocity = (step_at("flow_sde", i, *unit) for unit in ((1.0, 0.0), (0.0, 1.0)))
    scale = of_latents.std / (TEN[i] - TEN[i + 1]).sqrt()
    found = torch.cat([scale, of_latents.mean[0], of_velocity.mean[0], of_latents.std])
    assert_close(found, numbers(*PUBLISHED[i]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "mean", "std", "following", "logp"),
    [
        ("flow_sde", {}, 0.467192, 0.445897, 0.556372, -0.131270),
        ("dance_sde", {}, 0.518582, 0.0778406, 0.534150, 1.614154),
        ("cps", {}, 0.270447, 0.751685, 0.420784, -0.0226012),
    ],
)
def test_the_published_step_of_a_scalar(name, options, mean, std, following, logp):
    # From time .857692 to .790368 with x = .5, v = -.3, and the noise .2. Since the draw is .2 std from the
    # mean, a normalized density is -.2^2 / 2 - ln std - .918939, and that of cps is -(.2 std)^2.
    step = step_at(name, 3, 0.5, -0.3, **options)
    drawn = step.draw(numbers(0.2)[None])
    found = torch.cat([step.mean[0], step.std, drawn[0], step.logp(drawn)])
    assert_close(found, numbers(mean, std, following, logp), atol=2e-6, rtol=0)


def test_estimates_after_the_published_step():
    # x - t v = .5 + .857692 * .3 and x + (1 - t) v = .5 - .142308 * .3
    here = numbers(0.5), numbers(-0.3), TEN[3:4]
    assert_close(clean_estimate(*here), numbers(0.757308), atol=2e-6, rtol=0)
    assert_close(noise_estimate(*here), numbers(0.457308), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("noise_level", "published"),
    [(0.8, [0.91314, 0.86865, 0.81571, 0.75168]), (0.7, [0.85548, 0.81380])],
)
def test_the_published_noise_of_cps(noise_level, published):
    # the time that a step leads to, times sin(noise_level pi / 2) = .951057 or .891007
    found = [step_at("cps", i, 1.0, 0.0, noise_level=noise_level).std for i in range(len(published))]
    assert_close(torch.cat(found), numbers(*published), atol=6e-6, rtol=0)


# ---- what steps have in common


@pytest.mark.parametrize("noise_level", [0.1, 0.7, 1.3])
@pytest.mark.parametrize("num_steps", [6, 10, 40])
def test_the_first_step_of_flow_sde_has_the_deviation_noise_level(num_steps, noise_level):
    times = sd3_times(num_steps)
    step = step_at("flow_sde", 0, 1.0, 0.0, times, noise_level=noise_level)
    assert_close(step.std, numbers(noise_level))
    assert_close(step.mean[0], numbers(1 - noise_level**2 / 2))


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_the_drift_is_the_velocity_less_half_the_squared_noise_times_the_score(name, generator):
    latents, velocity = torch.randn(2, 8, 3, generator=generator, dtype=torch.float64)
    time, following = TEN[1:9], TEN[2:10]
    step = solver(name, noise_level=0.4)(latents, velocity, time, following, TEN[1])
    score = -(latents + along(1 - time, latents) * velocity) / along(time, latents)
    scale = step.std / (time - following).sqrt()
    drift = velocity - 0.5 * along(scale.square(), latents) * score
    assert_close(step.mean, latents + along(following - time, latents) * drift)
    expected = {"flow_sde": 0.4 * (time / (1 - time)).sqrt(), "dance_sde": torch.full_like(time, 0.4)}
    assert_close(scale, expected[name])


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_of_nearly_no_noise_is_eulers(name, generator):
    latents, velocity = torch.randn(2, 10, 3, generator=generator, dtype=torch.float64)
    step = solver(name, noise_level=1e-5)(latents, velocity, TEN[:-1], TEN[1:], TEN[1])
    assert_close(step.mean, euler_step(latents, velocity, TEN[:-1], TEN[1:]), atol=1e-8, rtol=0)
    assert step.std.max() < 6e-5


@pytest.mark.parametrize("noise_level", [0.3, 0.8, 1.0])
def test_cps_leaves_exactly_the_noise_of_the_following_time(noise_level):
    # With x = x_0 + t (x_1 - x_0), the step holds 1 - t' of x_0; the rest is x_1 and new noise.
    clean, noise = numbers(1.0).expand(10), numbers(0.0).expand(10)
    times, following = TEN[:-1], TEN[1:]
    run = solver("cps", noise_level=noise_level)
    of_clean = run(noised(clean, noise, times), noise - clean, times, following, TEN[1])
    of_noise = run(noised(noise, clean, times), clean - noise, times, following, TEN[1])
    assert_close(of_clean.mean, 1 - following)
    assert_close((of_noise.mean.square() + of_noise.std.square()).sqrt(), following)
    assert_close(of_noise.std, following * math.sin(noise_level * math.pi / 2))
    if noise_level == 1:
        assert of_noise.mean.abs().max() < 1e-7


def test_the_last_step_of_cps_is_the_clean_estimate_of_density_1():
    step = step_at("cps", 9, 0.5, -0.3)
    assert_close(step.mean[0], clean_estimate(numbers(0.5), numbers(-0.3), TEN[9:10]))
    assert step.std == 0
    assert step.logp(step.draw(numbers(0.7)[None])) == 0


@pytest.mark.parametrize("name", SOLVERS)
def test_rows_step_at_times_of_their_own(name, generator):
    latents, velocity = torch.randn(2, 9, 2, 3, generator=generator, dtype=torch.float64)
    run = solver(name)
    together = run(latents, velocity, TEN[:9], TEN[1:10], TEN[1])
    for i in range(9):
        alone = run(latents[i : i + 1], velocity[i : i + 1], TEN[i : i + 1], TEN[i + 1 : i + 2], TEN[1])
        assert_close(together.mean[i : i + 1], alone.mean)
        assert_close(together.std[i : i + 1], alone.std)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_density_has_the_gradient_of_finite_differences(name, generator):
    latents, velocity, noise = torch.randn(3, 3, 2, 2, generator=generator, dtype=torch.float64)
    run = solver(name, noise_level=0.5)
    at = TEN[[0, 3, 7]], TEN[[1, 4, 8]], TEN[1]
    drawn = run(latents, velocity, *at).draw(noise)
    density = lambda said: run(latents, said, *at).logp(drawn)
    assert torch.autograd.gradcheck(density, velocity.requires_grad_())


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("noise_level", [0.0, -0.5, float("nan")])
def test_a_step_without_noise_is_refused(name, noise_level):
    with pytest.raises(ConfigError, match="'solver.noise_level' must be (more than 0|a finite number)"):
        step_at(name, 3, 0.5, -0.3, noise_level=noise_level)


def test_cps_has_no_more_than_all_of_the_noise():
    with pytest.raises(ConfigError, match="'solver.noise_level' must be more than 0 and at most 1, not 1.2"):
        step_at("cps", 3, 0.5, -0.3, noise_level=1.2)


# ---- marginals


def moments_of(run, times, normal):
    """Send mean and variance of pure noise through the steps of a solver: each is linear in the latents, so
    both are exact. Two (S + 1,) tensors."""
    mean, variance = [numbers(0.0)[0]], [numbers(1.0)[0]]
    for here, there in zip(times[:-1], times[1:], strict=True):
        # What a step makes of 0 and 1 shows its line.
        ends = numbers(0.0, 1.0)
        at = here.expand(2), there.expand(2), times[1]
        step = run(ends, normal.velocity(ends, at[0]), *at)
        shift, slope = step.mean[0], step.mean[1] - step.mean[0]
        mean.append(shift + slope * mean[-1])
        variance.append(slope.square() * variance[-1] + step.std[0].square())
    return torch.stack(mean), torch.stack(variance)


@pytest.mark.parametrize(
    ("name", "noise_level", "shrinks"),
    [("flow_sde", 0.7, 1.8), ("flow_sde", 0.3, 1.1), ("dance_sde", 0.5, 3.5)],
)
def test_stochastic_steps_keep_the_marginals_the_better_the_shorter_they_are(name, noise_level, shrinks):
    # What is left of steps four times shorter: a quarter for constant noise. That of flow_sde is large near
    # t = 1, and what its first steps add to the variance fades as (dt)^(noise_level^2): by 4^.49 = 1.97.
    normal, run, gaps = Normal(), solver(name, noise_level=noise_level), []
    for num_steps in (100, 400):
        times = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        (mean, variance), exact = moments_of(run, times, normal), normal.moments(times)
        assert_close(mean, exact[0], atol=1e-12, rtol=0)
        gaps.append((variance - exact[1])[times < 0.8].abs().max())
    assert gaps[0] < 0.04
    assert gaps[0] / gaps[1] > shrinks


@pytest.mark.parametrize(("name", "noise_level"), [("flow_sde", 0.3), ("dance_sde", 0.5)])
def test_simulated_paths_have_the_mean_and_variance_of_the_flow_at_every_time(name, noise_level, generator):
    num_rows, normal, run = 20_000, Normal(), solver(name, noise_level=noise_level)
    times = shift_times(torch.linspace(1, 0, 401, dtype=torch.float64), 3.0)
    latents = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    for here, there in zip(times[:-1], times[1:], strict=True):
        at = here.expand(num_rows), there.expand(num_rows), times[1]
        step = run(latents, normal.velocity(latents, at[0]), *at)
        latents = step.draw(torch.randn(num_rows, generator=generator, dtype=torch.float64))
        mean, variance = normal.moments(there)
        # five standard errors of a mean and of a variance, and 1 in 100 for the length of the steps
        assert abs(latents.mean() - mean) < 5 * (variance / num_rows).sqrt() + 0.01 * variance.sqrt()
        assert abs(latents.var() / variance - 1) < 5 * math.sqrt(2 / num_rows) + 0.01


def test_every_solver_has_a_test_here():
    found = {
        name for name, thing in vars(solvers).items() if getattr(thing, "__module__", "") == solvers.__name__
    }
    assert found - {"check_noise"} == set(SOLVERS)
