"""A tiny HunyuanImage 2.1 pipeline: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

from tests.diffusion import tiny


def tiny_hunyuan_image(folder: Path):
    """Make text to image: 32 pixels are 4 by 4 latents of 4 channels."""
    from diffusers import (
        AdaptiveProjectedMixGuidance,
        AutoencoderKLHunyuanImage,
        FlowMatchEulerDiscreteScheduler,
        HunyuanImagePipeline,
        HunyuanImageTransformer2DModel,
    )
    from transformers import (
        ByT5Tokenizer,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        T5Config,
        T5EncoderModel,
    )

    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower)
    glyph = T5Config(vocab_size=400, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    tokenizer = tiny.qwen_tokenizer()
    tokenizer.padding_side = "right"
    transformer = tiny._seeded(
        lambda: HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=16,
            text_embed_2_dim=16,
            rope_axes_dim=(8, 8),
        ),
        gain=1.5,
    )
    vae = tiny._seeded(
        lambda: AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=64,
            scaling_factor=0.75,
        )
    )
    pipe = HunyuanImagePipeline(
        text_encoder=tiny._seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), gain=20.0),
        tokenizer=tokenizer,
        text_encoder_2=tiny._seeded(lambda: T5EncoderModel(glyph), gain=2.0),
        tokenizer_2=ByT5Tokenizer(extra_ids=0),
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=AdaptiveProjectedMixGuidance(),
    )
    return tiny._save(pipe, folder)


tiny.MAKERS["hunyuan_image"] = tiny_hunyuan_image
