"""HunyuanVideo 1.5 against its pipelines of diffusers."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from mmrl.diffusion.model_family import Request
from tests.diffusion import tiny_hunyuan_video15  # noqa: F401 (registers the pipelines)
from tests.diffusion.families.common import Family, FamilyTests, family_for, noise, ours, pictures, velocity

ASKED = ((1.0, ""), (4.0, 'an ugly "SALE"'))
SIZES = ((5, 32, 32), (5, 40, 24))


def call(pipe, request, latents, guidance, num_steps, negative):
    """Call the pipeline for one video, of the size of the request."""
    frames, height, width = request.size
    pipe.guider.guidance_scale = guidance
    given = {"height": height, "width": width}
    if request.images:
        pipe.video_processor.calculate_default_height_width = lambda **_: (height, width)
        given = {"image": picture(request.images[0])}
    return pipe(
        prompt=request.text,
        negative_prompt=negative,
        latents=latents,
        num_frames=frames,
        num_inference_steps=num_steps,
        output_type="pt",
        **given,
    ).frames


def picture(pixels):
    from PIL.Image import fromarray

    return fromarray(pixels.permute(1, 2, 0).numpy())


class HunyuanTests(FamilyTests):
    @pytest.fixture
    def pipe(self, pipeline):
        """The tiny pipeline, with less padding than published, so that tests are fast."""
        pipe = pipeline(self.case.maker)
        pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 100, 40
        pipe.vision_num_semantic_tokens = 9
        return pipe

    def load_adapter(self, plain, folder):
        plain.transformer.load_lora_adapter(str(folder), weight_name="pytorch_lora_weights.safetensors")


class TestHunyuanVideo15(HunyuanTests):
    case = Family("hunyuan_video15", call, 100, images=((), ()), sizes=SIZES, asked=ASKED, tolerance=1e-4)

    def test_words_in_quotes_are_read_twice_and_batched_with_texts_without(self, pipe):
        texts = ['a sign "OPEN"', "a sign OPEN", 'two signs, "IN" and "NEXT DOOR"']
        requests = [Request(text, (), SIZES[0]) for text in texts]
        latents = noise(pipe, SIZES[0])
        wanted = [call(pipe, request, latents, 1.0, 3, "") for request in requests]
        for request, video in zip(requests, wanted, strict=True):
            assert_close(ours(self.case, pipe, request, latents, 1.0), video, atol=1e-4, rtol=0)
        assert (wanted[0] - wanted[1]).abs().max() > 1e-3
        with torch.no_grad():
            conditions = family_for(pipe).encode(pipe, requests, 100)
            lengths = [len(one["encoder_hidden_states_2"]) for one in conditions]
            assert lengths == [len('Text "OPEN". ') + 1, 0, len('Text "IN". Text "NEXT DOOR". ') + 1]
            latents, sigma = latents.expand(3, -1, -1, -1, -1), torch.tensor([0.9, 0.6, 0.3])
            together = velocity(pipe, latents, sigma, conditions, 1.0)
            for i, condition in enumerate(conditions):
                alone = velocity(pipe, latents[i : i + 1], sigma[i : i + 1], [condition], 1.0)
                assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)

    def test_a_quote_that_would_be_cut_is_refused(self, pipe):
        family = family_for(pipe)
        family.check_text(pipe, f'a sign "{"a" * 20}"', 100)
        with pytest.raises(ValueError, match="tokens long, and the encoder 'ByT5Tokenizer' takes 40"):
            family.check_text(pipe, f'a sign "{"a" * 40}"', 100)
        with pytest.raises(ValueError, match="`max_sequence_length` is at most 100"):
            family.check_text(pipe, "a sign", 101)

    def test_latents_are_scaled_as_the_pipeline_decodes_them(self, pipe):
        video = torch.rand(1, 5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            latents = family_for(pipe).compress(pipe, video)
            mode = pipe.vae.encode(2 * video.transpose(1, 2) - 1).latent_dist.mode()
        assert_close(latents / pipe.vae.config.scaling_factor, mode)

    def test_videos_of_the_wrong_size_are_refused(self, pipe):
        family = family_for(pipe)
        assert family.latent_shape(pipe, 32, 40, 9) == (4, 3, 4, 5)
        assert family.frames_per_latent(pipe, (4, 3, 4, 5)) == (1, 4, 4)
        with pytest.raises(ValueError, match="one more than a multiple of 4"):
            family.latent_shape(pipe, 32, 32, 4)
        with pytest.raises(ValueError, match="multiple of 8 pixels"):
            family.latent_shape(pipe, 32, 36, 5)

    def test_other_guiders_are_refused(self, pipe, monkeypatch):
        from diffusers import ClassifierFreeGuidance

        other = ClassifierFreeGuidance(guidance_scale=6.0, guidance_rescale=0.5)
        monkeypatch.setattr(pipe, "guider", other)
        with pytest.raises(
            ValueError, match="guider is ClassifierFreeGuidance with {'guidance_rescale': 0.5"
        ):
            family_for(pipe).latent_shape(pipe, 32, 32, 5)


class TestHunyuanVideo15ImageToVideo(HunyuanTests):
    images = (((40, 48),), ((64, 24),))
    case = Family("hunyuan_video15_image", call, 100, images=images, sizes=SIZES, asked=ASKED, tolerance=1e-4)

    def test_an_image_of_the_pipelines_own_size_gives_the_pipelines_own_video(self, checkpoint):
        from tests.diffusion import tiny

        pipe = tiny.load(checkpoint("hunyuan_video15_image"))  # the size is the pipeline's choice
        (image,) = pictures(((30, 64),))
        height, width = pipe.video_processor.calculate_default_height_width(
            height=30, width=64, target_size=pipe.target_size
        )
        assert (height, width) == (24, 40)
        request = Request("a cat", (image,), (5, height, width))
        latents = noise(pipe, request.size)
        pipe.guider.guidance_scale = 1.0
        wanted = pipe(
            prompt="a cat", image=picture(image), latents=latents, num_frames=5, num_inference_steps=3,
            output_type="pt",
        ).frames  # fmt: skip
        assert_close(ours(self.case, pipe, request, latents, 1.0), wanted, atol=1e-4, rtol=0)

    def test_networks_that_read_the_next_time_are_refused(self, pipe, monkeypatch):
        config = type(pipe.transformer.config)({**pipe.transformer.config, "use_meanflow": True})
        monkeypatch.setattr(pipe.transformer, "_internal_dict", config)
        with pytest.raises(ValueError, match="use_meanflow"):
            family_for(pipe).latent_shape(pipe, 32, 32, 5)
