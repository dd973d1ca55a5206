"""A tiny Lumina-Image 2.0: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

from tests.diffusion import tiny


def gemma_tokenizer():
    """Make a Gemma tokenizer of single letters; as the published one, it begins every text with `<bos>`."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.gemma_tokenizer()
    begin = ("<bos>", tokenizer.bos_token_id)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[begin])
    return tokenizer


def gemma2():
    """Make a Gemma 2 that reads texts."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=120,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=4096,
    )
    return tiny._seeded(lambda: Gemma2Model(config), gain=5.0)


def tiny_lumina2(folder: Path):
    """Make Lumina-Image 2.0: 32 pixels are 4 by 4 latents of 4 channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    transformer = tiny._seeded(
        lambda: Lumina2Transformer2DModel(
            sample_size=4,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(300, 16, 16),
            cap_feat_dim=8,
        ),
        gain=2.0,
    )
    pipe = Lumina2Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=tiny.image_vae(4),
        text_encoder=gemma2(),
        tokenizer=gemma_tokenizer(),
    )
    return tiny._save(pipe, folder)


tiny.MAKERS["lumina2"] = tiny_lumina2
