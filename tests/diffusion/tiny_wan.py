"""Tiny pipelines of Wan: image to video (2.1), of 5 billion weights, and of two networks (2.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.diffusion import tiny

NETWORK = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def network(gain: float = 1.0, **options: Any):
    """Make a network of Wan."""
    from diffusers import WanTransformer3DModel

    return tiny._seeded(lambda: WanTransformer3DModel(**{**NETWORK, **options}), gain)


def text_encoder():
    """Make a UMT5."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return tiny._seeded(lambda: UMT5EncoderModel(UMT5Config(**sizes)))


def residual_vae():
    """Make the autoencoder of the 5 billion weights: sides shrink by 16, times by 4."""
    from diffusers import AutoencoderKLWan

    return tiny._seeded(
        lambda: AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        )
    )


def clip_vision() -> dict[str, Any]:
    """Make CLIP for images of 16 pixels, 5 tokens each, and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    encoder = tiny._seeded(lambda: CLIPVisionModel(config), gain=3.0)
    return {"image_encoder": encoder, "image_processor": processor}


def tiny_wan_pipeline(folder: Path, kind: str, **parts: Any):
    """Make a pipeline of a class of Wan."""
    import diffusers

    usual = {
        "tokenizer": tiny.t5_tokenizer(),
        "text_encoder": text_encoder(),
        "vae": tiny.video_vae("AutoencoderKLWan"),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer_2": None,
    }
    return tiny._save(getattr(diffusers, kind)(**{**usual, **parts}), folder)


def tiny_wan_i2v(folder: Path):
    """Make Wan 2.1, image to video: 4 channels of the mask, 4 of the image, and tokens of CLIP."""
    transformer = network(2.0, in_channels=12, image_dim=16, added_kv_proj_dim=24)
    parts = {"transformer": transformer, **clip_vision()}
    return tiny_wan_pipeline(folder, "WanImageToVideoPipeline", **parts)


def tiny_wan_5b(folder: Path, kind: str = "WanPipeline"):
    """Make Wan 2.2 of 5 billion weights: 5 frames of 32 pixels are 2 frames of 2 by 2 latents."""
    parts = {"transformer": network(2.0), "vae": residual_vae(), "expand_timesteps": True}
    return tiny_wan_pipeline(folder, kind, **parts)


def tiny_wan_a14b(folder: Path, kind: str = "WanPipeline", *, boundary: float = 0.7, **options: Any):
    """Make Wan 2.2 A14B: a network for times from `boundary` on, and another for those below."""
    parts = {"transformer": network(2.0, **options), "transformer_2": network(2.5, **options)}
    return tiny_wan_pipeline(folder, kind, **parts, boundary_ratio=boundary)


def tiny_wan_a14b_i2v(folder: Path):
    """Make Wan 2.2 A14B, image to video, which reads no CLIP."""
    return tiny_wan_a14b(folder, "WanImageToVideoPipeline", boundary=0.875, in_channels=12)


tiny.MAKERS.update(
    wan_i2v=tiny_wan_i2v,
    wan_5b=tiny_wan_5b,
    wan_a14b=tiny_wan_a14b,
    wan_a14b_i2v=tiny_wan_a14b_i2v,
    wan_5b_i2v=lambda folder: tiny_wan_5b(folder, "WanImageToVideoPipeline"),
)
