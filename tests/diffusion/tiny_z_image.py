"""A tiny Z-Image: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mmrl.core.rng import seeded
from tests.diffusion import tiny
from tests.diffusion.tiny_flux2 import qwen3_tokenizer


def qwen3():
    """Make a Qwen3 without a head."""
    from transformers import Qwen3Config, Qwen3Model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=1, num_hidden_layers=2, vocab_size=300)
    return tiny._seeded(lambda: Qwen3Model(config), gain=4.0)


def tiny_z_image(folder: Path):
    """Make Z-Image: 32 pixels are 4 by 4 latents of 4 channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    transformer = tiny._seeded(
        lambda: ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[160, 16, 16],
        ),
        gain=2.0,
    )
    with seeded(1), torch.no_grad():  # zeros in a new network
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=tiny.image_vae(4),
        text_encoder=qwen3(),
        tokenizer=qwen3_tokenizer(),
        transformer=transformer,
    )
    return tiny._save(pipe, folder)
