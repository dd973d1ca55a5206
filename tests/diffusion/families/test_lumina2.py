"""Lumina-Image 2.0 against its pipeline of diffusers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_lumina2  # noqa: F401 (registers the pipeline)
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise


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
        max_sequence_length=290,
        output_type="pt",
    ).images


class TestLumina2(FamilyTests):
    case = Family(
        "lumina2",
        call,
        limit=290,
        images=((), ()),
        sizes=((1, 32, 48), (1, 48, 32)),
        asked=((1.0, ""), (4.0, ""), (4.0, "an ugly BLURRED one. ")),
    )

    @pytest.mark.parametrize(
        "settings", [{"shift": 2.0}, {"use_dynamic_shifting": True, "max_image_seq_len": 300}]
    )
    def test_schedules_are_those_of_the_configuration(self, pipe, settings):
        from diffusers import FlowMatchEulerDiscreteScheduler

        pipe = copy.copy(pipe)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
        for size in self.case.sizes:
            latents = noise(pipe, size)
            call(pipe, self.case.requests(size)[0], latents, 1.0, 5, "")
            times = family_for(pipe).sigmas(pipe, 5, latents.shape[1:])
            assert_close(times, pipe.scheduler.sigmas, atol=1e-6, rtol=0)

    def test_latents_are_scaled_as_the_pipeline_decodes_them(self, pipe):
        pixels = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            latents = family_for(pipe).compress(pipe, pixels)
            mode = pipe.vae.encode(2 * pixels - 1).latent_dist.mode()
        assert_close(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor, mode)

    def test_lengths_and_sizes_beyond_the_positions_are_refused(self, pipe):
        with pytest.raises(ValueError, match="`max_sequence_length` is at most 299"):
            family_for(pipe).check_text(pipe, "a cat", 300)
        with pytest.raises(ValueError, match="multiple of 16 pixels of at most 256"):
            family_for(pipe).latent_shape(pipe, 272, 32, 1)

    @torch.no_grad()
    def test_the_negative_prompt_is_read_without_the_system_prompt(self, pipe):
        condition = family_for(pipe).encode_negative(pipe, Request("ugly"), 290)
        assert condition["encoder_attention_mask"].sum() == len(pipe.tokenizer("ugly").input_ids)
