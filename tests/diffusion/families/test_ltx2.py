"""LTX-2 against its pipeline of diffusers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_families.ltx2 import split
from tests.diffusion import tiny_ltx2  # noqa: F401 (registers the pipeline)
from tests.diffusion.families.common import (
    MATCHING,
    NUM_STEPS,
    Family,
    FamilyTests,
    family_for,
    noise,
    prompt_of,
    velocity,
)
from tests.diffusion.flows import denoise, flow

LIMIT = 64


def parts(pipe, latents):
    """Split latents into those of the video (B, C, f, h, w) and of the sound (B, length, C)."""
    frames, length = split(pipe.transformer.config, latents.shape[2:])
    filled = latents.shape[2] - frames
    return latents[:, :, filled:], latents[:, :, :filled].flatten(2)[..., :length].transpose(1, 2)


def raw_video(pipe, video):
    """Undo the normalisation of video latents (B, C, f, h, w)."""
    vae = pipe.vae
    return pipe._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def picture(request):
    from PIL.Image import fromarray

    return fromarray(request.images[0].permute(1, 2, 0).numpy())


@torch.no_grad()
def first_frame(pipe, request):
    """Encode an image as the pipeline does where it is given no latents: (1, C, 1, h, w)."""
    taken = []

    class Found(Exception):
        pass

    def noted(step_pipe, _step, _time, values):
        taken.append(values["latents"])
        raise Found

    frames, height, width = request.size
    plain = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_scale": 1.0}
    with pytest.raises(Found):
        pipe(
            image=picture(request), prompt="a cat", height=height, width=width, num_frames=frames,
            num_inference_steps=2, max_sequence_length=LIMIT, callback_on_step_end=noted,
            **plain, **{f"audio_{name}": value for name, value in plain.items()},
        )  # fmt: skip
    sides = (height // pipe.vae_spatial_compression_ratio, width // pipe.vae_spatial_compression_ratio)
    return taken[0].transpose(1, 2).unflatten(2, (-1, *sides))[:, :, :1]  # it stays as it is


def asked(pipe, request, latents, guidance, num_steps, negative, **options):
    """Call the pipeline for one video with plain guidance of video and sound."""
    frames, height, width = request.size
    video, sound = parts(pipe, latents)
    plain = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "guidance_scale": guidance}
    given = sound * pipe.audio_vae.latents_std + pipe.audio_vae.latents_mean  # the pipeline normalises both
    if request.images:
        first = first_frame(pipe, request)
        video, options = torch.cat([first, video[:, :, 1:]], 2), options | {"image": picture(request)}
    return pipe(
        prompt=request.text,
        negative_prompt=negative,
        latents=raw_video(pipe, video),
        audio_latents=given,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=num_steps,
        max_sequence_length=LIMIT,
        **plain,
        **{f"audio_{name}": value for name, value in plain.items()},
        **options,
    )


def call(*given):
    return asked(*given, output_type="pt").frames


class Ltx2Tests(FamilyTests):
    def test_compressed_pixels_have_the_shape_of_latents(self, pipe):
        with pytest.raises(ValueError, match="recorded videos have no sound"):
            family_for(pipe).compress(pipe, torch.rand(1, 5, 3, 32, 32))

    def test_a_policy_in_bfloat16_samples_and_reads_recorded_results(self, checkpoint):
        """It samples; recorded results are refused."""
        options = {"dtype": "bfloat16", "max_sequence_length": LIMIT}
        policy = flow(checkpoint(self.case.maker), {**MATCHING}, **options)
        frames, height, width = size = self.case.sizes[0]
        engine = denoise(policy, num_frames=frames, height=height, width=width, num_inference_steps=2)
        rows = engine.rollout([prompt_of(one) for one in self.case.requests(size)])
        with torch.no_grad():
            assert policy(policy.collate(rows)).logp.isfinite().all()
        with pytest.raises(ValueError, match="recorded videos have no sound"):
            policy.encode(rows[0].prompt, rows[0].outcomes[0])
        recorded = replace(rows[0].prompt, answers=(rows[0].outcomes[0],))
        options = {"model": str(checkpoint(self.case.maker))}
        assert "no sound" in type(policy).check_answers(options, [rows[0].prompt, recorded])[1]


class TestLtx2(Ltx2Tests):
    case = Family(
        "ltx2", call, limit=LIMIT, images=((), ()), sizes=((5, 32, 32), (9, 32, 64)),
        asked=((1.0, ""), (4.0, "an ugly one")), tolerance=5e-5,
    )  # fmt: skip

    @torch.no_grad()
    def test_latents_of_video_and_sound_are_those_of_the_pipeline(self, pipe):
        size = (9, 32, 32)
        request, latents, family = self.case.requests(size)[0], noise(pipe, size), family_for(pipe)
        wanted = asked(pipe, request, latents, 1.0, NUM_STEPS, "", output_type="latent")
        conditions = family.encode(pipe, [request], LIMIT)
        times = family.sigmas(pipe, NUM_STEPS, latents.shape[1:])
        for now, following in zip(times, times[1:], strict=False):
            latents = latents + (following - now) * velocity(pipe, latents, now[None], conditions, 1.0)
        video, sound = parts(pipe, latents)
        assert_close(raw_video(pipe, video), wanted.frames, atol=2e-5, rtol=0)
        sound = sound * pipe.audio_vae.latents_std + pipe.audio_vae.latents_mean
        sound = sound.unflatten(2, (2, -1)).transpose(1, 2)  # channels and bins
        assert_close(sound, wanted.audio, atol=2e-5, rtol=0)
        # What fills the frames of the sound ends at zero.
        filled = latents[:, :, : latents.shape[2] - video.shape[2]].flatten(2)
        assert filled.shape[2] > sound.shape[2]
        assert filled[..., sound.shape[2] :].abs().max() < 1e-6

    def test_frames_of_sound_come_before_the_video(self, pipe):
        family = family_for(pipe)
        # 9 frames are .375 seconds, so 9 latents of 25 per second; 2 by 3 latents are a frame.
        assert family.latent_shape(pipe, 16, 24, 9) == (4, 2 + 5, 2, 3)
        assert family.frames_per_latent(pipe, (4, 7, 2, 3)) == (0, 0, 1, 2, 2, 2, 2)
        with pytest.raises(ValueError, match="one more than a multiple of 2"):
            family.latent_shape(pipe, 16, 24, 8)
        for frames in range(1, 40):
            shape = family.latent_shape(pipe, 16, 24, 2 * frames - 1)
            assert split(pipe.transformer.config, shape[1:])[0] == frames

    def test_lengths_that_registers_do_not_fill_are_refused(self, pipe):
        with pytest.raises(ValueError, match="multiple of 8, not 60"):
            family_for(pipe).check_text(pipe, "a cat", 60)


class TestLtx2ImageToVideo(Ltx2Tests):
    case = Family(
        "ltx2_image", call, limit=LIMIT, images=(((40, 48),), ((64, 32),)),
        sizes=((5, 32, 32), (5, 32, 64)), asked=((1.0, ""), (4.0, "an ugly one")), tolerance=5e-5,
    )  # fmt: skip

    @torch.no_grad()
    def test_the_first_frame_is_that_of_the_pipeline(self, pipe):
        for request in self.case.requests((5, 32, 64)):
            (condition,) = family_for(pipe).encode(pipe, [request], LIMIT)
            assert_close(condition["first_latent"], first_frame(pipe, request)[0], atol=1e-5, rtol=0)
