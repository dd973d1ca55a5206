"""Times of denoising steps, and the way to and from schedulers of diffusers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.flow_math import euler_step
from mmrl.diffusion.schedule import check_times, scheduled_times, shift_times
from tests.diffusion.flows import TEXTS, scheduler_of, sd3_times, unshift_times
from tests.diffusion.test_model_families import noise

TEN = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
FOURTEEN = [
    1, 0.973058, 0.943048, 0.909412, 0.871453, 0.82828, 0.778738, 0.721306, 0.653936, 0.573805, 0.476909,
    0.357368, 0.206198, 0.008929, 0,
]  # fmt: skip


def sd3_scheduler(**options):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **options})


def flux_like():
    return sd3_scheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)


@pytest.mark.parametrize("published", [TEN, FOURTEEN])
def test_the_schedule_of_sd35_is_the_published_one(published):
    # S values evenly from 1 to 0.002994, moved by s -> 3 s / (1 + 2 s), and 0 behind them
    wanted = torch.tensor(published)
    times = scheduled_times(sd3_scheduler(), len(published) - 1)
    assert times.dtype == torch.float32
    assert_close(times, wanted, atol=1e-6, rtol=0)
    assert_close(sd3_times(len(published) - 1).float(), wanted, atol=1e-6, rtol=0)


def test_times_are_shifted_towards_noise():
    # 3 * .5 / (1 + 2 * .5) = .75; both ends stay where they are
    assert_close(shift_times(torch.tensor([0.0, 0.5, 1.0]), 3.0), torch.tensor([0.0, 0.75, 1.0]))


@pytest.mark.parametrize("shift", [1.0, 1.7, 3.0, 12.0])
def test_a_shift_can_be_undone(shift):
    times = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert_close(unshift_times(shift_times(times, shift), shift), times, atol=1e-14, rtol=0)
    assert_close(shift_times(unshift_times(times, shift), shift), times, atol=1e-14, rtol=0)


def test_reading_a_schedule_leaves_the_scheduler_as_it_was():
    scheduler = sd3_scheduler()
    scheduler.set_timesteps(5)
    before = scheduler.sigmas.clone(), scheduler.timesteps.clone(), scheduler.num_inference_steps
    scheduled_times(scheduler, 7)
    assert torch.equal(scheduler.sigmas, before[0])
    assert torch.equal(scheduler.timesteps, before[1])
    assert scheduler.num_inference_steps == before[2]


def test_times_that_a_pipeline_gives_are_shifted_by_its_scheduler():
    # .5 -> .75 and .25 -> .75 / 1.5 = .5
    given = torch.tensor([1.0, 0.5, 0.25])
    assert_close(scheduled_times(sd3_scheduler(), 3, sigmas=given), torch.tensor([1.0, 0.75, 0.5, 0.0]))


def test_a_schedule_may_depend_on_the_size_of_the_image():
    # With mu the shift is exp(mu): .5 -> e / (e + 1) for mu = 1.
    given = torch.tensor([1.0, 0.5])
    times = scheduled_times(flux_like(), 2, sigmas=given, mu=1.0)
    assert_close(times, torch.tensor([1.0, 0.7310586, 0.0]))


@pytest.mark.parametrize("num_steps", [1, 4, 10])
@pytest.mark.parametrize("make", [sd3_scheduler, flux_like])
def test_a_schedule_goes_into_a_scheduler_and_comes_back(make, num_steps):
    times = scheduled_times(make(), num_steps, mu=0.8 if make is flux_like else None)
    scheduler = scheduler_of(times)
    assert_close(scheduler.sigmas, times, atol=0, rtol=1e-7)
    assert_close(scheduler.timesteps, 1000 * times[:-1], atol=0, rtol=1e-6)
    assert_close(scheduled_times(scheduler, num_steps, sigmas=times[:-1]), times, atol=0, rtol=1e-7)


def test_a_step_of_that_scheduler_is_an_euler_step(generator):
    times = scheduled_times(sd3_scheduler(), 10)
    scheduler = scheduler_of(times)
    theirs = ours = torch.randn(2, 4, 4, 4, generator=generator)
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(theirs.shape, generator=generator)
        theirs = scheduler.step(velocity, timestep, theirs, return_dict=False)[0]
        ours = euler_step(ours, velocity, times[i].expand(2), times[i + 1].expand(2))
        assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_a_plain_pipeline_steps_through_our_times(checkpoint):
    from tests.diffusion import tiny

    pipe = tiny.load(checkpoint("sd3"))
    times = torch.tensor([1.0, 0.9, 0.4, 0.15, 0.0])
    pipe.scheduler = scheduler_of(times)
    seen = []
    pipe(
        list(TEXTS),
        sigmas=times[:-1].tolist(),
        latents=noise((4, 4, 4)),
        height=32,
        width=32,
        num_inference_steps=4,
        guidance_scale=1.0,
        output_type="latent",
        max_sequence_length=1,
        callback_on_step_end=lambda pipe, i, timestep, given: seen.append(float(timestep)) or given,
    )
    assert_close(torch.tensor(seen), 1000 * times[:-1])
    assert_close(pipe.scheduler.sigmas, times)


@pytest.mark.parametrize(
    "times",
    [[1.0, 0.5], [1.0, 0.5, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0], [[1.0, 0.0]], [1.0, float("nan"), 0.0]],
)
def test_times_that_do_not_fall_to_0_are_refused(times):
    with pytest.raises(ValueError, match="must fall strictly and end at 0, but are"):
        check_times(torch.tensor(times))
