"""Wan: image to video, and the model of 5 billion weights, against their pipelines."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_families.wan import Wan
from mmrl.diffusion.model_families.wan_image_to_video import WanImageToVideo
from mmrl.diffusion.model_family import Request
from mmrl.diffusion.steps import Conditioning
from tests.diffusion import tiny_wan  # its pipelines are in `tiny.MAKERS`
from tests.diffusion.families.common import (
    MATCHING,
    Family,
    FamilyTests,
    family_for,
    noise,
    pictures,
    prompt_of,
)
from tests.diffusion.flows import denoise, flow


def call(pipe, request, latents, guidance, num_steps, negative):
    """Call a pipeline of Wan for one request."""
    frames, height, width = request.size
    shown = {"image": to_pil(request.images[0])} if request.images else {}
    return pipe(
        prompt=request.text,
        negative_prompt=negative,
        latents=latents,
        guidance_scale=guidance,
        num_inference_steps=num_steps,
        num_frames=frames,
        height=height,
        width=width,
        max_sequence_length=512 if pipe.transformer.config.image_dim else 64,
        output_type="pt",
        return_dict=False,
        **shown,
    )[0]


ASKED = ((1.0, ""), (4.0, "an ugly BLURRED one. "))
IMAGES = (((24, 40),), ((50, 30),))  # one image each, of other sizes than the video


ROUNDING = 1e-6  # norms are float32 in any network of Wan


class TestImageToVideo(FamilyTests):
    case = Family(
        "wan_i2v", call, 512, IMAGES, ((5, 32, 32), (9, 32, 48)), ASKED,
        tolerance=1e-4, rounding=ROUNDING, too_long="cat " * 600,
    )  # fmt: skip


class TestFiveBillion(FamilyTests):
    case = Family(
        "wan_5b", call, 64, ((), ()), ((5, 32, 32), (5, 64, 32)), ASKED, tolerance=1e-4, rounding=ROUNDING
    )


class TestFiveBillionImageToVideo(FamilyTests):
    case = Family("wan_5b_i2v", call, 64, IMAGES, ((5, 32, 32), (9, 64, 32)), ASKED, rounding=ROUNDING)

    @pytest.fixture(autouse=True)
    def without_clip(self, monkeypatch):
        """peft skips the targets that read CLIP's tokens; the checks look for every target."""
        monkeypatch.setattr(WanImageToVideo, "targets", Wan.targets)


SHOWN = Request("a cat", pictures(((24, 40),)), (9, 32, 48))


@pytest.mark.parametrize("maker", ["wan_i2v", "wan_5b_i2v"])
def test_images_are_encoded_as_the_pipeline_prepares_them(pipeline, maker):
    pipe = pipeline(maker)
    request = Request(SHOWN.text, SHOWN.images, (9, 32, 64))
    (condition,) = family_for(pipe).encode(pipe, [request], 512)
    (image,) = map(to_pil, request.images)
    pixels = pipe.video_processor.preprocess(image, height=32, width=64)
    prepared = pipe.prepare_latents(pixels, 2, 4, 32, 64, 9, torch.float32, torch.device("cpu"))[1]
    if maker == "wan_5b_i2v":
        assert condition["first_latents"].shape == (4, 1, 2, 4)
        assert_close(prepared, condition["first_latents"].expand(2, -1, -1, -1, -1), atol=1e-6, rtol=0)
        return
    assert condition["image_latents"].shape == (4, 3, 4, 8)
    assert_close(prepared[:, 4:], condition["image_latents"].expand(2, -1, -1, -1, -1), atol=1e-6, rtol=0)
    seen = []
    network = copy.copy(pipe.transformer)
    network.forward = lambda hidden_states, **_: (seen.append(hidden_states), hidden_states[:, :4])[1:]
    stacked = {name: value[None] for name, value in condition.items()}
    latents = noise(pipe, request.size)
    family_for(pipe).velocity(network, latents, torch.tensor([0.5]), stacked, torch.ones(1))
    assert_close(seen[0], torch.cat([latents, prepared[:1]], 1), atol=1e-6, rtol=0)


def test_steps_of_any_size_end_at_the_given_frame(pipeline):
    pipe = pipeline("wan_5b_i2v")
    family, request = family_for(pipe), Request("a cat", pictures(((24, 40),)), (5, 32, 32))
    (condition,) = family.encode(pipe, [request], 64)
    latents, stacked = noise(pipe, request.size), {name: value[None] for name, value in condition.items()}
    for now, following in ((1.0, 0.6), (0.6, 0.0)):
        sigma = torch.tensor([now])
        with torch.no_grad():
            velocity = family.velocity(pipe.transformer, latents, sigma, stacked, torch.ones(1))
        latents = latents + (following - now) * velocity
    assert_close(latents[0, :, :1], condition["first_latents"], atol=1e-6, rtol=0)
    at_end = family.velocity(pipe.transformer, latents, torch.zeros(1), stacked, torch.ones(1))
    assert at_end.isfinite().all()


def test_a_given_frame_has_no_error_of_matching(checkpoint):
    # The flow from noise to the frame is known: its velocity is noise - data, without an error.
    policy = flow(checkpoint("wan_5b_i2v"), MATCHING, max_sequence_length=64)
    engine = denoise(policy, num_frames=5)
    (row,) = engine.rollout([prompt_of(Request("a cat", pictures(((24, 40),))))])
    clean = row.steps.path[-1:]  # (1, *L)
    error = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0), dtype=clean.dtype)
    sigma = torch.tensor([0.7], dtype=clean.dtype)
    velocity = policy.velocity(
        0.3 * clean + 0.7 * error, sigma, Conditioning.of([row.steps.condition], 1.0, 1)
    )
    away = (velocity - (error - clean)).square()
    assert away[:, :, 0].max() < 1e-10
    assert away[:, :, 1:].mean() > 1e-3


def test_lengths_that_the_network_would_split_elsewhere_are_refused(pipeline):
    pipe = pipeline("wan_i2v")
    with pytest.raises(ValueError, match="`max_sequence_length` must be 512 for this model, not 64"):
        family_for(pipe).encode(pipe, [SHOWN], 64)


def test_a_model_of_first_and_last_frame_is_refused(pipeline):
    pipe = copy.copy(pipeline("wan_i2v"))
    pipe.transformer = tiny_wan.network(image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=10)
    with pytest.raises(ValueError, match="wants the first and the last frame"):
        family_for(pipe).latent_shape(pipe, 32, 32, 5)


def test_published_schedulers_give_flow_times(pipeline):
    from diffusers import UniPCMultistepScheduler

    pipe = copy.copy(pipeline("wan_i2v"))
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 5.0}
    pipe.scheduler = UniPCMultistepScheduler(**options)
    times = family_for(pipe).sigmas(pipe, 4, (4, 2, 4, 4))
    call(pipe, SHOWN, noise(pipe, SHOWN.size), 1.0, 4, "")
    assert_close(times, pipe.scheduler.sigmas.cpu(), atol=1e-6, rtol=0)
