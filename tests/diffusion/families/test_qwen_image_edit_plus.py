"""Qwen-Image-Edit-Plus against its own pipeline of diffusers."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from torch.testing import assert_close

from mmrl.diffusion.image_io import to_pil
from mmrl.diffusion.model_family import Request, pack
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours, pictures

SMALLER = 128  # 90 x 90 pixels in place of 1024 x 1024, and 34 x 34 in place of 384 x 384


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let the pipeline resize images to fewer pixels."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        sizes = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, sizes=sizes: sizes(area / SMALLER, ratio)
        )


def call(pipe, request, latents, guidance, num_steps, negative):
    _, height, width = request.size
    return pipe(
        [to_pil(image) for image in request.images],
        request.text,
        latents=pack(latents),
        true_cfg_scale=guidance,
        negative_prompt=negative,
        num_inference_steps=num_steps,
        height=height,
        width=width,
        output_type="pt",
        return_dict=False,
    )[0]


class TestQwenImageEditPlus(FamilyTests):
    case = Family(
        "qwen_image_edit_plus",
        call,
        400,
        images=(((48, 40),), ((24, 72), (56, 48))),
        too_long="cat " * 600,
    )

    def test_images_are_seen_in_their_order_and_sizes(self, pipe):
        family, images = family_for(pipe), pictures(((64, 24), (24, 64), (40, 40)))
        with torch.no_grad():
            straight, turned = family.encode(
                pipe, [Request("blend", images), Request("blend", images[::-1])], 400
            )
        assert [straight[f"image_{i}"].shape[1:] for i in range(3)] == [(20, 8), (8, 20), (12, 12)]
        assert torch.equal(straight["image_0"], turned["image_2"])
        assert torch.equal(straight["image_1"], turned["image_1"])
        assert family.batch_key(straight) != family.batch_key(turned)

    def test_images_have_the_latents_of_the_pipeline(self, pipe):
        (image,) = pictures(((56, 48),))
        signed = pipe.image_processor.preprocess(to_pil(image), 96, 96).unsqueeze(2)
        _, wanted = pipe.prepare_latents([signed], 1, 4, 32, 32, torch.float32, "cpu", None)
        with torch.no_grad():
            (condition,) = family_for(pipe).encode(pipe, [Request("a", (image,))], 400)
        assert_close(pack(condition["image_0"][None]), wanted, atol=1e-5, rtol=0)

    def test_a_network_that_tells_images_time_zero_gives_the_image_of_the_pipeline(self, pipe):
        # as the checkpoint 2511 does (zero_cond_t)
        own = copy.copy(pipe)
        own.transformer = copy.deepcopy(pipe.transformer)
        own.transformer.zero_cond_t = True
        for block in own.transformer.transformer_blocks:
            block.zero_cond_t = True
        size = (1, 32, 48)
        request, latents = self.case.requests(size)[1], noise(pipe, size)
        wanted = call(own, request, latents, 4.0, 3, "ugly")
        made = ours(self.case, own, request, latents, 4.0, 3, "ugly")
        assert_close(made, wanted, atol=2e-5, rtol=0)
        assert (made - ours(self.case, pipe, request, latents, 4.0, 3, "ugly")).abs().max() > 1e-3
