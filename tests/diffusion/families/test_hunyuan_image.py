"""HunyuanImage 2.1 against its pipeline of diffusers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_hunyuan_image  # noqa: F401 (registers the pipeline)
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours


def call(pipe, request, latents, guidance, num_steps, negative):
    """Call the pipeline for one image; up to its sixth step its guider is classifier-free."""
    pipe.guider.guidance_scale = guidance
    _, height, width = request.size
    return pipe(
        prompt=request.text,
        negative_prompt=negative,
        latents=latents,
        height=height,
        width=width,
        num_inference_steps=num_steps,
        output_type="pt",
    ).images


class TestHunyuanImage(FamilyTests):
    case = Family("hunyuan_image", call, 220, images=((), ()), asked=((1.0, ""), (4.0, 'an ugly "SALE"')))

    @pytest.fixture
    def pipe(self, pipeline):
        """The tiny pipeline, with less padding than published, so that tests are fast."""
        pipe = pipeline(self.case.maker)
        pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 220, 40
        return pipe

    def load_adapter(self, plain, folder):
        plain.transformer.load_lora_adapter(str(folder), weight_name="pytorch_lora_weights.safetensors")

    def test_with_plain_guidance_many_steps_are_those_of_the_pipeline(self, pipe, monkeypatch):
        from diffusers import ClassifierFreeGuidance

        request = Request('a sign "OPEN"', (), (1, 32, 48))
        latents = noise(pipe, request.size)
        made = ours(self.case, pipe, request, latents, 3.5, num_steps=9, negative="a dog")
        mixed = call(pipe, request, latents, 3.5, 9, "a dog")
        monkeypatch.setattr(pipe, "guider", ClassifierFreeGuidance())
        assert_close(made, call(pipe, request, latents, 3.5, 9, "a dog"), atol=1e-4, rtol=0)
        assert (made - mixed).abs().max() > 1e-2  # what the docstring says of the pipeline's own guider

    def test_words_in_quotes_are_read_twice(self, pipe):
        texts = ['a sign "OPEN"', "a sign OPEN"]
        with torch.no_grad():
            requests = [Request(text, (), (1, 32, 32)) for text in texts]
            conditions = family_for(pipe).encode(pipe, requests, 220)
        lengths = [len(one["encoder_hidden_states_2"]) for one in conditions]
        assert lengths == [len('Text "OPEN". ') + 1, 0]
        with pytest.raises(ValueError, match="tokens long, and the encoder 'ByT5Tokenizer' takes 40"):
            family_for(pipe).check_text(pipe, f'a sign "{"a" * 40}"', 220)

    @pytest.mark.parametrize("option", ["use_meanflow", "guidance_embeds"])
    def test_distilled_networks_are_refused(self, pipe, monkeypatch, option):
        config = type(pipe.transformer.config)({**pipe.transformer.config, option: True})
        monkeypatch.setattr(pipe.transformer, "_internal_dict", config)
        with pytest.raises(ValueError, match=option):
            family_for(pipe).latent_shape(pipe, 32, 32, 1)
