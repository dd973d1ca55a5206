"""Qwen-Image-Edit against its own pipeline of diffusers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from torch.testing import assert_close

from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_family import pack
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours

SMALLER = 256  # 64 x 64 pixels in place of 1024 x 1024


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let the pipeline resize images to fewer pixels."""
    sizes = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: sizes(area / SMALLER, ratio)
    )


def call(pipe, request, latents, guidance, num_steps, negative):
    _, height, width = request.size
    return pipe(
        to_pil(request.images[0]),
        [request.text],
        latents=pack(latents),
        true_cfg_scale=guidance,
        negative_prompt=[negative],
        num_inference_steps=num_steps,
        height=height,
        width=width,
        output_type="pt",
        return_dict=False,
    )[0]


class TestQwenImageEdit(FamilyTests):
    case = Family("qwen_image_edit", call, 400, images=(((48, 40),), ((24, 72),)), too_long="cat " * 600)

    def test_images_have_the_latents_of_the_pipeline(self, pipe):
        (request, _) = self.case.requests((1, 32, 32))
        image = pipe.image_processor.resize(to_pil(request.images[0]), 64, 64)
        signed = pipe.image_processor.preprocess(image, 64, 64).unsqueeze(2)
        _, wanted = pipe.prepare_latents(signed, 1, 4, 32, 32, torch.float32, "cpu", None)
        with torch.no_grad():
            (condition,) = family_for(pipe).encode(pipe, [request], 400)
        assert_close(pack(condition["image_0"][None]), wanted, atol=1e-5, rtol=0)

    def test_the_language_model_sees_the_image(self, pipe):
        (request, _) = self.case.requests((1, 32, 32))
        dark = replace(request, images=(request.images[0] // 4,))
        with torch.no_grad():
            one, other = family_for(pipe).encode(pipe, [request, dark], 400)
        apart = (one["encoder_hidden_states"] - other["encoder_hidden_states"]).abs()
        assert apart.shape[0] > 9 and apart.max() > 1e-2

    def test_a_text_of_the_limit_is_read_and_one_token_more_is_not(self, pipe):
        family, tokens = (
            family_for(pipe),
            len(pipe.tokenizer(pipe.prompt_template_encode.format("")).input_ids),
        )
        most = 400 + pipe.prompt_template_encode_start_idx - tokens
        family.check_text(pipe, "a" * most, 400)
        with pytest.raises(ValueError, match="tokens long, and the encoder"):
            family.check_text(pipe, "a" * (most + 1), 400)
        with pytest.raises(ValueError, match="at most 1024"):
            family.check_text(pipe, "a", 1025)


@pytest.mark.slow
def test_images_of_the_size_of_the_pipeline_give_its_image(pipeline, monkeypatch):
    monkeypatch.undo()  # the areas of the pipeline
    case, pipe = TestQwenImageEdit.case, pipeline("qwen_image_edit")
    (request, _) = case.requests((1, 32, 48))
    latents = noise(pipe, (1, 32, 48))
    wanted = call(pipe, request, latents, 1.0, 2, "")
    made = ours(case, pipe, request, latents, 1.0, 2)
    assert_close(made, wanted, atol=2e-5, rtol=0)
