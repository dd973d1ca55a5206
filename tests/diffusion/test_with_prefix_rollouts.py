"""Pictures of prefixes: what is completed, from where, and at what cost."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.core.rng import Stream
from mmrl.diffusion.engines.with_prefix_rollouts import WithPrefixRollouts
from mmrl.diffusion.flow_math import ODE_STEPS, clean_estimate
from tests.diffusion.flows import SOLVERS, Known, Normal, asked, denoise, flow, make


def walking(policy=None, **options):
    """Make the engine that is wrapped: stochastic steps over the flow of normal data."""
    usual = {"solver": "diffusion.flow_sde", "height": 2, "width": 2, "num_inference_steps": 5}
    return denoise(policy or Known(), **{**usual, **options})


def probed(engine, **options) -> WithPrefixRollouts:
    return make("engine", "diffusion.with_prefix_rollouts", engine, **options)


def completed(engine, row, k):
    """Finish a prefix of `k` recorded steps, one row and one step after the other."""
    move, times, normal = engine.ode_step, engine.times, Normal(float(row.prompt.text))
    first = int(row.steps.at[0]) + k
    latents = row.steps.path[first][None]
    for i in range(first, len(times) - 1):
        here, there = times[i : i + 1], times[i + 1 : i + 2]
        latents = move(latents, normal.velocity(latents, here), here, there, normal.velocity)
    return latents[0]


def pictures(row):
    return torch.stack([outcome.image for outcome in row.outcomes]).int()


@pytest.mark.parametrize(
    "options", [{}, {"ode": "heun"}, {"stochastic": (1, 3)}, {"window_size": 1, "window_start": 2}]
)
def test_every_prefix_is_completed_as_if_it_were_alone(options):
    engine = walking(**options)
    prompts = asked("0.2", "0.7", num=2)
    plain, rows = engine.rollout(prompts), probed(engine).rollout(prompts)
    latents = probed(engine).finished(plain)
    for i, (row, before) in enumerate(zip(rows, plain, strict=True)):
        num_steps = before.length
        assert [outcome.end for outcome in row.outcomes] == list(range(num_steps + 1))
        assert torch.equal(row.outcomes[-1].image, before.outcomes[0].image)
        assert row.length == num_steps and torch.equal(row.steps.path, before.steps.path)
        for k in range(num_steps):
            alone = completed(engine, before, k)
            assert_close(latents[i, k], alone, atol=1e-12, rtol=0)
            assert (pictures(row)[k] - engine.policy.decode(alone[None])[0].int()).abs().max() <= 1


def test_network_evaluations_of_ten_steps_of_which_nine_are_stochastic():
    # 10 for the image, 10 for the deterministic one, and 9 + 8 + ... + 2 = 44 for the prefixes of 1 to 8.
    engine = walking(num_inference_steps=10)
    rows = probed(engine).rollout(asked("0.5", num=3))
    assert engine.policy.evaluations == 3 * (10 + 10 + 44)
    assert [len(row.outcomes) for row in rows] == [10] * 3


def test_guided_evaluations_count_twice_and_heun_asks_again():
    engine = walking(num_inference_steps=10, guidance_scale=4.5)
    probed(engine).rollout(asked("0.5"))
    assert engine.policy.evaluations == 2 * 64
    engine = walking(num_inference_steps=10, ode="heun")
    probed(engine).rollout(asked("0.5"))
    # Every deterministic step but the 1 + 9 last ones asks twice.
    assert engine.policy.evaluations == 64 + (54 - 9)


def test_completions_run_as_one_growing_batch():
    engine = walking(num_inference_steps=10)
    probed(engine).rollout(asked("0.5", num=2))
    assert engine.policy.largest == 2 * 9
    engine = walking(num_inference_steps=10)
    probed(engine, batch_size=5).rollout(asked("0.5", num=2))
    assert engine.policy.largest == 5


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_size_of_a_batch_changes_no_image(size, one_step):
    prompts = asked("0.2", "0.7", num=2)
    rows = probed(walking(), batch_size=size, one_step=one_step).rollout(prompts)
    for row, other in zip(rows, probed(walking(), one_step=one_step).rollout(prompts), strict=True):
        assert (pictures(row) - pictures(other)).abs().max() <= 1


@pytest.mark.parametrize("name", SOLVERS)
def test_the_first_probe_starts_from_the_rows_own_noise(name):
    # With hardly any noise in the steps, every prefix becomes the row's image.
    engine = walking(solver={"name": f"diffusion.{name}", "noise_level": 1e-6})
    rows = engine.rollout(asked("0.5", num=3))
    latents = probed(engine).finished(rows)
    for row, prefixes in zip(rows, latents, strict=True):
        assert_close(prefixes, row.steps.path[-1].expand_as(prefixes), atol=1e-4, rtol=0)
    # Other rows start elsewhere, so a shared or fresh start would be seen.
    assert (latents[0, 0] - latents[1, 0]).abs().max() > 0.1
    for row in probed(engine).rollout(asked("0.5", num=3)):
        assert (pictures(row) - pictures(row)[-1]).abs().max() <= 1


def test_what_noise_there_is_sets_prefixes_apart():
    (row,) = probed(walking(height=8, width=8)).rollout(asked("0.5"))
    gaps = (pictures(row)[1:] - pictures(row)[:-1]).abs().float().flatten(1).mean(1)
    assert (gaps > 1).all()


def test_the_guidance_of_the_row_completes_it():
    engine = walking(guidance_scale=3.0, num_inference_steps=40, stochastic=(0, 2))
    (row,) = engine.rollout(asked("0.3"))
    # The deterministic image of guidance 3 lies about the mean .9.
    finished = probed(engine).finished((row,))[0, 0]
    assert_close(finished, 0.9 + 0.3 * row.steps.path[0], atol=0.1, rtol=0)


# ---- one step


def test_one_step_probes_are_clean_estimates():
    engine = walking()
    (row,) = probed(engine, one_step=True).rollout(asked("0.5"))
    assert [outcome.end for outcome in row.outcomes] == [1, 2, 3, 4]
    for k in range(1, 4):
        here, time = row.steps.path[k][None], engine.times[k : k + 1]
        jump = clean_estimate(here, Normal(0.5).velocity(here, time), time)
        assert (pictures(row)[k - 1] - engine.policy.decode(jump)[0].int()).abs().max() <= 1
    # 5 for the row, 3 for its jumps
    assert engine.policy.evaluations == 8


def test_one_step_behind_a_window():
    engine = walking(num_inference_steps=6, stochastic=(1, 5), window_size=3, window_start=2)
    (row,) = probed(engine, one_step=True).rollout(asked("0.5"))
    assert row.steps.at.tolist() == [2, 3, 4]
    assert [outcome.end for outcome in row.outcomes] == [1, 2, 3]
    here, time = row.steps.path[3][None], engine.times[3:4]
    jump = clean_estimate(here, Normal(0.5).velocity(here, time), time)
    assert (pictures(row)[0] - engine.policy.decode(jump)[0].int()).abs().max() <= 1


@pytest.mark.parametrize("one_step", [False, True])
def test_a_window_of_one_step(one_step):
    engine = walking(stochastic=(1, 2))
    rows = probed(engine, one_step=one_step).rollout(asked("0.5", num=2))
    assert [[outcome.end for outcome in row.outcomes] for row in rows] == [[1] if one_step else [0, 1]] * 2


# ---- with a network


@pytest.mark.parametrize("one_step", [False, True])
def test_probes_of_a_network_are_images_like_its_own(checkpoint, one_step):
    policy = flow(checkpoint("sd3"))
    engine = denoise(policy, solver="diffusion.cps", guidance_scale=2.0)
    prompts = asked("a cat", "two dogs", num=2)
    rows = probed(engine, one_step=one_step, batch_size=3).rollout(prompts)
    for row, plain in zip(rows, engine.rollout(prompts), strict=True):
        assert pictures(row).shape == (3 if one_step else 4, 3, 32, 32)
        assert (pictures(row)[-1] - plain.outcomes[-1].image.int()).abs().max() <= 1
        assert torch.equal(row.notes["logp"], plain.notes["logp"])
    batch = policy.collate(rows)
    assert batch.mask.shape == (4, 3)


def test_probes_of_videos_have_times(checkpoint):
    policy = flow(checkpoint("wan"), max_sequence_length=8)
    engine = denoise(
        policy, solver="diffusion.cps", num_frames=5, frames_per_second=4.0, num_inference_steps=3
    )
    (row,) = probed(engine).rollout(asked("a cat"))
    assert [outcome.video.shape for outcome in row.outcomes] == [(5, 3, 32, 32)] * 3
    assert_close(row.outcomes[0].times, torch.arange(5) / 4)


# ---- what is refused


@pytest.mark.parametrize("one_step", [False, True])
def test_no_prompts_no_rows(one_step):
    assert probed(walking(), one_step=one_step).rollout([]) == ()


def test_engines_without_a_walk_are_refused():
    still = denoise(Known(likelihood="diffusion.matching"), height=2, width=2)
    for engine in (still, walking(share=0.5)):
        with pytest.raises(ValueError, match="needs a `solver` .* and `share: 1`"):
            probed(engine)


def test_draws_of_matching_are_no_prefixes():
    policy = Known(likelihood="diffusion.matching")
    with pytest.raises(ValueError, match="but the steps of the policy's likelihood are draws"):
        probed(walking(policy))
    # To look at, in an evaluation, they are fine.
    rows = probed(walking(policy, stream=Stream(purpose="evaluate"))).rollout(asked("0.5"))
    assert len(rows[0].outcomes) == 5


def test_a_negative_batch_size_is_refused():
    with pytest.raises(ValueError, match="engine.batch_size' must be at least 0, not -1"):
        probed(walking(), batch_size=-1)


def test_completions_that_are_no_numbers_name_their_prompt(monkeypatch):
    engine = walking()
    move = ODE_STEPS["euler"]
    # What diverges in a completion only: the wrapped engine is done by then.
    monkeypatch.setattr(engine, "ode_step", lambda *given: move(*given) * float("nan"))
    rows = walking().rollout(asked("0.2", "0.7"))
    monkeypatch.setattr(engine, "rollout", lambda prompts: rows)
    with pytest.raises(FloatingPointError, match="of prompt '0.2' .* NaN or infinite after denoising step 0"):
        probed(engine).rollout(asked("0.2", "0.7"))
