"""Z-Image against its pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion.families.common import NUM_STEPS, Family, FamilyTests, family_for, noise, ours

LIMIT = 128  # at most, with 160 positions


def call(pipe, request, latents, guidance, num_steps, negative):
    _, height, width = request.size
    return pipe(
        [request.text],
        negative_prompt=[negative],
        guidance_scale=guidance,
        latents=latents,
        height=height,
        width=width,
        num_inference_steps=num_steps,
        max_sequence_length=LIMIT,
        output_type="pt",
        return_dict=False,
    )[0]


class TestZImage(FamilyTests):
    case = Family(
        "z_image", call, LIMIT, images=((), ()), asked=((0.0, ""), (0.5, "ugly"), (4.0, "an ugly one")),
    )  # fmt: skip

    def test_guidance_starts_above_0(self, pipe):
        family = family_for(pipe)
        assert [family.passes(scale) for scale in (0.0, 0.5, 1.0)] == [1, 2, 2]
        with_text, without = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 0.0]])
        assert family.guide(with_text, without, 3.0).tolist() == [[5.0, -4.0]]

    def test_a_shift_by_size_is_that_of_the_pipeline(self, pipe):
        from diffusers import FlowMatchEulerDiscreteScheduler

        sized, size = copy.copy(pipe), (1, 48, 32)
        sized.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=4)
        request, latents = Request("a cat", size=size), noise(pipe, size)
        wanted = call(sized, request, latents, 2.0, NUM_STEPS, "")
        assert_close(ours(self.case, sized, request, latents, 2.0), wanted, atol=2e-5, rtol=0)
        times = family_for(sized).sigmas(sized, NUM_STEPS, tuple(latents.shape[1:]))
        assert (times - family_for(pipe).sigmas(pipe, NUM_STEPS, tuple(latents.shape[1:]))).abs().max() > 0.05

    def test_latents_are_scaled_as_the_pipeline_decodes_them(self, pipe):
        pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            latents = family_for(pipe).compress(pipe, pixels)
            mode = pipe.vae.encode(2 * pixels - 1).latent_dist.mode()
        assert_close(latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor, mode)

    def test_a_text_of_exactly_the_limit_is_read_and_one_token_more_is_not(self, pipe):
        family = family_for(pipe)
        with torch.no_grad():
            (short,) = family.encode(pipe, [Request("a")], LIMIT)
            most = LIMIT - len(short["states"]) + 1  # letters
            (full,) = family.encode(pipe, [Request("a" * most)], LIMIT)
        assert len(full["states"]) == LIMIT and most > 10
        with pytest.raises(ValueError, match=f"{LIMIT + 1} tokens long, and the encoder"):
            family.check_text(pipe, "a" * (most + 1), LIMIT)
        with pytest.raises(ValueError, match="`max_sequence_length` is at most 128, not 129"):
            family.check_text(pipe, "a", LIMIT + 1)
