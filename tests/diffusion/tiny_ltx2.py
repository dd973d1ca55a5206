"""A tiny LTX-2: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.diffusion import tiny
from tests.diffusion.tiny_lumina2 import gemma_tokenizer


def gemma3():
    """Make a Gemma 3 that reads texts."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={
            "vocab_size": 120,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=119,
        boi_token_index=117,
        eoi_token_index=118,
    )
    return tiny._seeded(lambda: Gemma3ForConditionalGeneration(config), gain=5.0)


def autoencoders():
    """Make the autoencoders of video and sound."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video

    video = tiny._seeded(
        lambda: AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            down_block_types=("LTX2VideoDownBlock3D",),
            decoder_block_out_channels=(8,),
            layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatiotemporal",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            timestep_conditioning=False,
            patch_size=4,
            scaling_factor=1.3,
        )
    )
    sound = tiny._seeded(
        lambda: AutoencoderKLLTX2Audio(
            base_channels=4,
            ch_mult=(1, 1, 1),
            num_res_blocks=1,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        )
    )
    with torch.no_grad():
        for part in (video, sound):
            count = torch.arange(len(part.latents_mean.flatten())).view_as(part.latents_mean)
            part.latents_mean.copy_(0.1 * count - 0.2)
            part.latents_std.copy_(1.0 + 0.2 * count)
    return video, sound


def tiny_ltx2(folder: Path, kind: str = "LTX2Pipeline"):
    """Make LTX-2 text to video, or another kind of it, of 4 channels for video and sound."""
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    video, sound = autoencoders()
    transformer = tiny._seeded(
        lambda: LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            vae_scale_factors=(video.temporal_compression_ratio, *[video.spatial_compression_ratio] * 2),
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=2,
            caption_channels=16,
            rope_type="split",
        ),
        gain=2.0,
    )
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": 8}
    connectors = tiny._seeded(
        lambda: LTX2TextConnectors(
            caption_channels=16,
            text_proj_in_factor=3,
            **{f"{kind}_connector_{name}": n for kind in ("video", "audio") for name, n in heads.items()},
            connector_rope_base_seq_len=32,
            rope_type="split",
        )
    )
    vocoder = tiny._seeded(
        lambda: LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
        )
    )
    pipe = getattr(diffusers, kind)(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=16,
            max_image_seq_len=64, shift_terminal=0.1,
        ),
        vae=video,
        audio_vae=sound,
        text_encoder=gemma3(),
        tokenizer=gemma_tokenizer(),
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    )  # fmt: skip
    return tiny._save(pipe, folder)


tiny.MAKERS["ltx2"] = tiny_ltx2
tiny.MAKERS["ltx2_image"] = lambda folder: tiny_ltx2(folder, "LTX2ImageToVideoPipeline")
