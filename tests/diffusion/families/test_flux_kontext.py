"""FLUX.1 Kontext against its own pipeline of diffusers."""

from __future__ import annotations

import copy

import diffusers
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch.testing import assert_close

from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_family import Request, pack
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours, pictures

SMALL = [(48, 112), (64, 64), (80, 56), (112, 48)]  # (width, height) in place of those of about 1024 x 1024


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let the pipeline prefer smaller images."""
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", SMALL)


def call(pipe, request, latents, guidance, num_steps, negative):
    _, height, width = request.size
    return pipe(
        to_pil(request.images[0]) if request.images else None,
        [request.text],
        latents=pack(latents),
        guidance_scale=guidance,
        num_inference_steps=num_steps,
        height=height,
        width=width,
        max_area=height * width,  # the size that is asked for
        max_sequence_length=60,
        output_type="pt",
        return_dict=False,
    )[0]


class TestFluxKontext(FamilyTests):
    case = Family(
        "flux_kontext", call, 60, images=((), ((48, 40),), ((40, 96),)), asked=((1.0, ""), (4.0, ""))
    )

    def test_images_have_the_latents_of_the_pipeline(self, pipe):
        (image,) = pictures(((48, 72),))
        signed = pipe.image_processor.preprocess(to_pil(image), 48, 80)
        wanted = pipe.prepare_latents(signed, 1, 4, 32, 32, torch.float32, "cpu", None)[1]
        with torch.no_grad():
            (condition,) = family_for(pipe).encode(pipe, [Request("a", (image,))], 60)
        assert_close(pack(condition["image_0"][None]), wanted, atol=1e-5, rtol=0)

    def test_an_image_smaller_than_a_token_is_refused(self, pipe):
        with pytest.raises(ValueError, match="an image of 48 x 12 pixels is smaller than one token of 16 x"):
            family_for(pipe).encode(pipe, [Request("a", pictures(((48, 12),)))], 60)

    @pytest.mark.parametrize(
        "settings",
        [
            {
                "use_dynamic_shifting": True,
                "max_shift": 0.9,
                "base_image_seq_len": 4,
                "max_image_seq_len": 64,
            },
            {"shift": 2.0, "shift_terminal": 0.1},
        ],
    )
    def test_schedules_follow_the_configuration(self, pipe, settings):
        own = copy.copy(pipe)
        own.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**settings)
        size = (1, 32, 48)
        request, latents = self.case.requests(size)[1], noise(pipe, size)
        wanted = call(own, request, latents, 4.0, 3, "")
        assert_close(ours(self.case, own, request, latents, 4.0), wanted, atol=2e-5, rtol=0)

    def test_times_are_even_for_other_schedulers_as_well(self, pipe):
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "solver_order": 1}
        own = copy.copy(pipe)
        own.scheduler = diffusers.UniPCMultistepScheduler(
            **flow, use_dynamic_shifting=True, time_shift_type="exponential"
        )
        own.scheduler.register_to_config(max_shift=1.15)  # the pipeline's default
        size = (1, 32, 48)
        latents = noise(pipe, size)
        call(own, self.case.requests(size)[0], latents, 4.0, 3, "")
        times = family_for(pipe).sigmas(own, 3, tuple(latents.shape[1:]))
        assert_close(times, own.scheduler.sigmas.float(), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_images_of_the_size_of_the_pipeline_give_its_image(pipeline, monkeypatch):
    monkeypatch.undo()  # the sizes of the pipeline
    case, pipe = TestFluxKontext.case, pipeline("flux_kontext")
    size = (1, 32, 48)
    request, latents = case.requests(size)[1], noise(pipe, size)
    wanted = call(pipe, request, latents, 4.0, 1, "")
    assert_close(ours(case, pipe, request, latents, 4.0, 1), wanted, atol=2e-5, rtol=0)
