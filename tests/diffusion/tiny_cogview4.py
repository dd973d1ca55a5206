"""A tiny CogView4: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

from tests.diffusion import tiny


def glm_tokenizer():
    """Make a GLM tokenizer of single bytes; as the published one, it begins every text with two tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = tiny.qwen_tokenizer()._tokenizer
    begin = [(word, inner.token_to_id(word)) for word in ("<|im_start|>", "<|im_end|>")]
    inner.post_processor = TemplateProcessing(single="<|im_start|> <|im_end|> $A", special_tokens=begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        additional_special_tokens=[word for word, _ in begin],
        padding_side="left",
    )


def tiny_cogview4(folder: Path):
    """Make CogView4: 32 pixels are 4 by 4 latents of 4 channels."""
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
    from transformers import GlmConfig, GlmModel

    transformer = tiny._seeded(
        lambda: CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=16,
            time_embed_dim=8,
            condition_dim=4,
            pos_embed_max_size=16,
            sample_size=4,
            rope_axes_dim=(16, 16),
        ),
        gain=2.0,
    )
    config = GlmConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=256,
        eos_token_id=256,
    )
    pipe = CogView4Pipeline(
        tokenizer=glm_tokenizer(),
        text_encoder=tiny._seeded(lambda: GlmModel(config), gain=20.0),
        vae=tiny.image_vae(4),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )
    pipe.vae.register_to_config(shift_factor=0.0)  # as published; the pipeline reads none
    return tiny._save(pipe, folder)


tiny.MAKERS["cogview4"] = tiny_cogview4
