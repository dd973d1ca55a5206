"""CogView4 against its pipeline of diffusers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_cogview4  # noqa: F401 (registers the pipeline)
from tests.diffusion.families import checks

LIMIT = 64
SIZES = [(1, 32, 48), (1, 64, 32)]
ASKED = [(1.0, ""), (4.0, ""), (4.0, "an ugly BLURRED one. ")]


def requests(size):
    return [Request("a cat", (), size), Request("two dogs on a red boat", (), size)]


@pytest.fixture(scope="module")
def pipe(pipeline):
    return pipeline("cogview4")


def theirs(pipe, request, latents, guidance=4.0, negative="", num_steps=3):
    """Call the pipeline for one row."""
    _, height, width = request.size
    return pipe(
        request.text,
        negative_prompt=negative,
        latents=latents,
        height=height,
        width=width,
        guidance_scale=guidance,
        num_inference_steps=num_steps,
        max_sequence_length=LIMIT,
        output_type="pt",
    ).images


@pytest.mark.parametrize("size", SIZES)
def test_euler_steps_make_what_the_pipeline_makes(pipe, size):
    checks.check_euler(pipe, lambda *row: theirs(pipe, *row), requests(size), limit=LIMIT, asked=ASKED)


def test_text_and_guidance_change_the_image(pipe):
    checks.check_effects(pipe, requests(SIZES[0]), limit=LIMIT)


@pytest.mark.parametrize(
    "settings",
    [
        {"shift": 2.5},
        {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_image_seq_len": 4},
        {"use_dynamic_shifting": True, "time_shift_type": "exponential", "base_shift": 0.3},
    ],
)
def test_schedules_are_those_of_the_configuration(pipe, settings):
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = copy.copy(pipe)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    for size in SIZES:
        latents = checks.noise(pipe, size, rows=1)
        wanted = theirs(pipe, requests(size)[0], latents, num_steps=7)
        times = checks.family_for(pipe).sigmas(pipe, 7, latents.shape[1:])
        assert_close(times, pipe.scheduler.sigmas, atol=1e-6, rtol=0)
        made = checks.follow(pipe, requests(size)[:1], latents, 4.0, limit=LIMIT, num_steps=7)
        assert_close(made, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("setting", ["use_karras_sigmas", "shift_terminal"])
def test_schedules_without_an_inverse_are_refused(pipe, setting):
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = copy.copy(pipe)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**{setting: 0.1})
    with pytest.raises(ValueError, match=f"sets `{setting}`"):
        checks.family_for(pipe).sigmas(pipe, 4, (4, 4, 4))


def test_texts_in_a_batch_say_what_they_say_alone(pipe):
    both = [*requests(SIZES[0]), Request("a dog", (), SIZES[0])]
    lengths = [len(one["encoder_hidden_states"]) for one in checks.family_for(pipe).encode(pipe, both, LIMIT)]
    assert lengths == [16, 32, 16]
    checks.check_batch(pipe, both, limit=LIMIT)


def test_latents_are_scaled_as_the_pipeline_decodes_them(pipe):
    pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latents = checks.family_for(pipe).compress(pipe, pixels)
        scaled = pipe.vae.encode(2 * pixels - 1).latent_dist.mode()
        assert_close(latents / pipe.vae.config.scaling_factor, scaled)
        assert checks.family_for(pipe).decode(pipe, latents).shape == pixels.shape


def test_a_saved_adapter_makes_the_same_image_in_a_plain_pipeline(pipe, checkpoint, tmp_path):
    (request, _), latents = requests(SIZES[0]), checks.noise(pipe, SIZES[0], rows=1)
    make = lambda other: theirs(other, request, latents)
    checks.check_adapter(pipe, checkpoint("cogview4"), tmp_path, make)


def test_a_policy_samples_and_learns(checkpoint):
    checks.check_policy(checkpoint("cogview4"), requests(SIZES[0]), limit=LIMIT)


def test_prompts_that_do_not_fit_are_refused(pipe, checkpoint):
    checks.check_refusals(pipe, checkpoint("cogview4"), requests(SIZES[0])[0], limit=LIMIT)
    with pytest.raises(ValueError, match="multiple of 16 pixels of at most 256"):
        checks.family_for(pipe).latent_shape(pipe, 272, 32, 1)


def test_a_text_makes_no_control_token(pipe, monkeypatch):
    checks.check_control_words(pipe, requests(SIZES[0])[0], limit=LIMIT, monkeypatch=monkeypatch)
