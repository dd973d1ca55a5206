"""CogView4 against its pipeline of diffusers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_cogview4  # noqa: F401 (registers the pipeline)
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours, velocity

LIMIT = 64
DYNAMIC = {"use_dynamic_shifting": True}


def call(pipe, request, latents, guidance, num_steps, negative):
    """Call the pipeline for one image."""
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


class TestCogView4(FamilyTests):
    case = Family(
        "cogview4",
        call,
        limit=LIMIT,
        images=((), ()),
        sizes=((1, 32, 48), (1, 64, 32)),
        asked=((1.0, ""), (4.0, ""), (4.0, "an ugly BLURRED one. ")),
    )

    @pytest.mark.parametrize(
        "settings",
        [
            {"shift": 2.5},
            DYNAMIC | {"time_shift_type": "linear", "base_image_seq_len": 4},
            DYNAMIC | {"time_shift_type": "exponential", "base_shift": 0.3},
        ],
    )
    def test_schedules_are_those_of_the_configuration(self, pipe, settings):
        from diffusers import FlowMatchEulerDiscreteScheduler

        pipe = copy.copy(pipe)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
        for size in self.case.sizes:
            request, latents = self.case.requests(size)[0], noise(pipe, size)
            wanted = call(pipe, request, latents, 4.0, 7, "")
            times = family_for(pipe).sigmas(pipe, 7, latents.shape[1:])
            assert_close(times, pipe.scheduler.sigmas, atol=1e-6, rtol=0)
            assert_close(ours(self.case, pipe, request, latents, 4.0, 7), wanted, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("setting", ["use_karras_sigmas", "shift_terminal"])
    def test_schedules_without_an_inverse_are_refused(self, pipe, setting):
        from diffusers import FlowMatchEulerDiscreteScheduler

        pipe = copy.copy(pipe)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(**{setting: 0.1})
        with pytest.raises(ValueError, match=f"sets `{setting}`"):
            family_for(pipe).sigmas(pipe, 4, (4, 4, 4))

    @torch.no_grad()
    def test_rows_of_mixed_lengths_are_put_back_in_order(self, pipe):
        texts = ["a cat", "two dogs on a red boat", "a dog"]
        conditions = family_for(pipe).encode(pipe, [Request(text) for text in texts], LIMIT)
        assert [len(one["encoder_hidden_states"]) for one in conditions] == [16, 32, 16]
        latents, sigma = noise(pipe, (1, 32, 48), rows=3), torch.tensor([0.9, 0.6, 0.3])
        together = velocity(pipe, latents, sigma, conditions, 1.0)
        for i, condition in enumerate(conditions):
            alone = velocity(pipe, latents[i : i + 1], sigma[i : i + 1], [condition], 1.0)
            assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)

    @torch.no_grad()
    def test_a_process_of_shards_makes_as_many_calls_as_the_one_with_most_lengths(self, pipe, monkeypatch):
        conditions = family_for(pipe).encode(
            pipe, [Request("a cat"), Request("two dogs on a red boat")], LIMIT
        )
        latents, sigma = noise(pipe, (1, 32, 48), rows=2), torch.tensor([0.9, 0.6])
        wanted, calls, forward = velocity(pipe, latents, sigma, conditions, 1.0), [], pipe.transformer.forward
        monkeypatch.setattr("mmrl.diffusion.model_families.cogview4.meets", lambda network: True)
        monkeypatch.setattr("mmrl.diffusion.model_families.cogview4.most_calls", lambda calls, device: 3)
        count = lambda **given: calls.append(1) or forward(**given)
        monkeypatch.setattr(pipe.transformer, "forward", count)
        assert torch.equal(velocity(pipe, latents, sigma, conditions, 1.0), wanted) and len(calls) == 3

    def test_latents_are_scaled_as_the_pipeline_decodes_them(self, pipe):
        pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            latents = family_for(pipe).compress(pipe, pixels)
            mode = pipe.vae.encode(2 * pixels - 1).latent_dist.mode()
        assert_close(latents / pipe.vae.config.scaling_factor, mode)

    def test_sizes_beyond_the_positions_are_refused(self, pipe):
        with pytest.raises(ValueError, match="multiple of 16 pixels of at most 256"):
            family_for(pipe).latent_shape(pipe, 272, 32, 1)
