"""Tiny HunyuanVideo 1.5 pipelines: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

from tests.diffusion import tiny

# The system message is cut, so that tests are fast: letters are tokens.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content[:92] if message.role == 'system' else message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parts():
    """Make the parts that both pipelines share."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import (
        ByT5Tokenizer,
        Qwen2_5_VLTextConfig,
        Qwen2_5_VLTextModel,
        T5Config,
        T5EncoderModel,
    )

    text = Qwen2_5_VLTextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=300,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    )
    glyph = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    tokenizer = tiny.qwen_tokenizer()
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "right"
    transformer = tiny._seeded(
        lambda: HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=16,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=32,
        ),
        gain=1.5,
    )
    vae = tiny._seeded(
        lambda: AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            scaling_factor=1.4,
        ),
    )
    return {
        "text_encoder": tiny._seeded(lambda: Qwen2_5_VLTextModel(text), gain=20.0),
        "tokenizer": tokenizer,
        "text_encoder_2": tiny._seeded(lambda: T5EncoderModel(glyph), gain=2.0),
        "tokenizer_2": ByT5Tokenizer(extra_ids=0),
        "transformer": transformer,
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }


def tiny_hunyuan_video15(folder: Path):
    """Make text to video: 5 frames of 32 pixels are 2 frames of 4 by 4 latents of 4 channels."""
    from diffusers import HunyuanVideo15Pipeline

    return tiny._save(HunyuanVideo15Pipeline(**parts()), folder)


def tiny_hunyuan_video15_image(folder: Path):
    """Make image to video, of the same latents."""
    from diffusers import HunyuanVideo15ImageToVideoPipeline
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=24,
        patch_size=8,
    )
    pipe = HunyuanVideo15ImageToVideoPipeline(
        **parts(),
        image_encoder=tiny._seeded(lambda: SiglipVisionModel(config), gain=2.0),
        feature_extractor=SiglipImageProcessor(size={"height": 24, "width": 24}),
    )
    return tiny._save(pipe, folder)


tiny.MAKERS["hunyuan_video15"] = tiny_hunyuan_video15
tiny.MAKERS["hunyuan_video15_image"] = tiny_hunyuan_video15_image
