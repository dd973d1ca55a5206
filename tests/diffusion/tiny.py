"""Tiny pipelines of every family: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

import string
from importlib import import_module
from pathlib import Path

import torch

from mmrl.core.rng import seeded

LETTERS = string.ascii_letters + string.digits + string.punctuation
CLIP_TEXT = {
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "max_position_embeddings": 77,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}


def _seeded(make, gain: float = 1.0):
    """Build with weights that are the same every time, and leave the global generator as it was. Matrices are
    `gain` times as large: at 1, some networks hardly see the text."""
    with seeded(0), torch.no_grad():
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= gain
        return model


def _bytes() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def clip_tokenizer(max_length: int = 77):
    """Make a CLIP tokenizer without merges: every letter is a token, the last of a word another."""
    from transformers import CLIPTokenizer

    words = [*_bytes(), *(letter + "</w>" for letter in _bytes()), "<|startoftext|>", "<|endoftext|>"]
    vocab = {word: i for i, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=max_length)


def clip_text(projection: bool = True, **options):
    """Make a text tower of CLIP."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    return _seeded(lambda: kind(CLIPTextConfig(**{**CLIP_TEXT, **options})))


def image_vae(latent_channels: int):
    """Make an image autoencoder that shrinks sides by 8, with a scale and a shift that a test can see."""
    from diffusers import AutoencoderKL

    return _seeded(
        lambda: AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=latent_channels,
            scaling_factor=1.5,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
            sample_size=32,
        )
    )


def load(folder: Path):
    """Read a pipeline from its folder. Parts that are absent there have to be named: diffusers does not fill
    them in."""
    from diffusers import DiffusionPipeline

    parts = DiffusionPipeline.load_config(folder)
    absent = {name: None for name, part in parts.items() if part == [None, None]}
    pipe = DiffusionPipeline.from_pretrained(folder, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _save(pipe, folder: Path):
    """Write a pipeline as an ordinary checkpoint folder and read it back."""
    pipe.save_pretrained(folder, safe_serialization=True)
    return load(folder)


def tiny_sd3(folder: Path, *, pixel: bool = False):
    """Make Stable Diffusion 3 with two CLIP towers and no T5: 32 pixels are 4 by 4 latents of 4 channels.

    With `pixel` there is no autoencoder: the network works on 3 channels, of which the pipeline makes one for
    8 pixels asked for.
    """
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    transformer = _seeded(
        lambda: SD3Transformer2DModel(
            sample_size=4,
            patch_size=1,
            in_channels=3 if pixel else 4,
            out_channels=3 if pixel else 4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=32 if pixel else 16,
        )
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=None if pixel else image_vae(4),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(hidden_act="gelu"),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    return _save(pipe, folder)


def t5_tokenizer():
    """Make a T5 tokenizer of single letters, lower-case ones more likely than others."""
    from transformers import T5TokenizerFast

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in LETTERS]
    return T5TokenizerFast(vocab=words, extra_ids=0)


def t5_encoder():
    """Make a T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return _seeded(lambda: T5EncoderModel(T5Config(**sizes)))


def tiny_flux(folder: Path, *, embedded: bool = True, dynamic: bool = True):
    """Make FLUX.1: 32 pixels are 4 by 4 latents of 4 channels.

    With `embedded` the guidance is an input (dev), without it is none (schnell); `dynamic` is the shift of
    times by size (dev).
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = _seeded(
        lambda: FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=embedded,
            axes_dims_rope=(4, 4, 8),
        )
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic),
        vae=image_vae(4),
        text_encoder=clip_text(projection=False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )
    return _save(pipe, folder)


def qwen_tokenizer():
    """Make a Qwen tokenizer of single bytes."""
    from transformers import Qwen2Tokenizer

    words = [*_bytes(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def qwen_encoder():
    """Make a Qwen2.5-VL that reads texts."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    )
    return _seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), gain=20.0)


def video_vae(kind: str):
    """Make the video autoencoder of Wan, or its copy of Qwen-Image: sides shrink by 8, times by 4."""
    import diffusers

    return _seeded(
        lambda: getattr(diffusers, kind)(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 2.0, 1.0],
        )
    )


def tiny_qwen_image(folder: Path):
    """Make Qwen-Image: 32 pixels are 4 by 4 latents of 4 channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

    transformer = _seeded(
        lambda: QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        gain=2.0,
    )
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=video_vae("AutoencoderKLQwenImage"),
        text_encoder=qwen_encoder(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )
    return _save(pipe, folder)


def gemma_tokenizer():
    """Make a Gemma tokenizer of single letters."""
    from transformers import GemmaTokenizer

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", "\n", *LETTERS]
    return GemmaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])


def tiny_sana(folder: Path):
    """Make Sana: 64 pixels are 2 by 2 latents of 4 channels."""
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    transformer = _seeded(
        lambda: SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=8,
            sample_size=32,
        )
    )
    vae = _seeded(
        lambda: AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            encoder_block_out_channels=(8,) * 6,
            decoder_block_out_channels=(8,) * 6,
            encoder_qkv_multiscales=((),) * 6,
            decoder_qkv_multiscales=((),) * 6,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )
    )
    text = _seeded(
        lambda: Gemma2Model(
            Gemma2Config(
                vocab_size=120,
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=4,
                max_position_embeddings=4096,
            )
        )
    )
    pipe = SanaPipeline(
        tokenizer=gemma_tokenizer(),
        text_encoder=text,
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return _save(pipe, folder)


def tiny_wan(folder: Path):
    """Make Wan text-to-video: 5 frames of 32 pixels are 2 frames of 4 by 4 latents of 4 channels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    transformer = _seeded(
        lambda: WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        )
    )
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    pipe = WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=_seeded(lambda: UMT5EncoderModel(UMT5Config(**sizes))),
        vae=video_vae("AutoencoderKLWan"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        transformer_2=None,
    )
    return _save(pipe, folder)


def _elsewhere(name: str, module: str = ""):
    """Find a maker in the module of its name, which imports this one."""

    def make(folder: Path):
        return getattr(import_module(f"tests.diffusion.{module or name}"), name)(folder)

    return make


MAKERS = {
    "sd3": tiny_sd3,
    "sd3_pixel": lambda folder: tiny_sd3(folder, pixel=True),
    "flux": tiny_flux,
    "flux_schnell": lambda folder: tiny_flux(folder, embedded=False, dynamic=False),
    "qwen_image": tiny_qwen_image,
    "sana": tiny_sana,
    "wan": tiny_wan,
    "qwen_image_edit": _elsewhere("tiny_qwen_image_edit"),
    "flux_kontext": _elsewhere("tiny_flux_kontext"),
    "qwen_image_edit_plus": _elsewhere("tiny_qwen_image_edit_plus", "tiny_qwen_image_edit"),
    "flux2": _elsewhere("tiny_flux2"),
    "flux2_klein": _elsewhere("tiny_flux2_klein", "tiny_flux2"),
    "flux2_klein_distilled": _elsewhere("tiny_flux2_klein_distilled", "tiny_flux2"),
    "z_image": _elsewhere("tiny_z_image"),
}
