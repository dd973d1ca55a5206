"""Tiny pipelines of FLUX.2 and FLUX.2 klein: real classes of diffusers and transformers, random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.diffusion import tiny

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content[0].text %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ text }}[/INST]{% endif %}{% endfor %}"
)
MISTRAL_WORDS = [
    "<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[IMG]", "[IMG_BREAK]", "[IMG_END]",
]  # fmt: skip


def qwen3_tokenizer():
    """Make a Qwen tokenizer of single bytes, with a chat template that knows thinking."""
    tokenizer = tiny.qwen_tokenizer()
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def qwen3(num_layers: int):
    """Make a Qwen3 language model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=1, num_hidden_layers=num_layers, vocab_size=300)
    return tiny._seeded(lambda: Qwen3ForCausalLM(config), gain=4.0)


def mistral_processor():
    """Make a Pixtral processor of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PixtralImageProcessor, PixtralProcessor, PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate([*MISTRAL_WORDS, *tiny._bytes()])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        additional_special_tokens=MISTRAL_WORDS[4:], padding_side="left",
    )  # fmt: skip
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=MISTRAL_TEMPLATE)


def mistral3():
    """Make a Mistral 3 of 30 layers: FLUX.2 reads the states after 10, 20 and 30."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    text = {"model_type": "mistral", "num_hidden_layers": 30, "num_key_value_heads": 1, "vocab_size": 300}
    sight = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 32, "patch_size": 16}
    config = Mistral3Config(text_config=text | sizes, vision_config=sight | sizes, image_token_id=8)
    return tiny._seeded(lambda: Mistral3ForConditionalGeneration(config), gain=4.0)


def flux2_vae():
    """Make the autoencoder: sides shrink by 8, then 2 x 2 positions are packed and standardised."""
    from diffusers import AutoencoderKLFlux2

    vae = tiny._seeded(
        lambda: AutoencoderKLFlux2(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=2,
            latent_channels=4,
            sample_size=32,
        )
    )
    generator = torch.Generator().manual_seed(2)
    vae.bn.running_mean.copy_(torch.randn(16, generator=generator) / 4)
    vae.bn.running_var.copy_(0.25 + torch.rand(16, generator=generator))
    return vae


def transformer(joint_attention_dim: int, *, embedded: bool):
    """Make the network; with `embedded` the guidance is an input."""
    from diffusers import Flux2Transformer2DModel

    return tiny._seeded(
        lambda: Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=joint_attention_dim,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=embedded,
        ),
        gain=2.0,
    )


def scheduler():
    """Make the published scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def tiny_flux2(folder: Path):
    """Make FLUX.2: 32 pixels are 2 by 2 latents of 16 channels."""
    from diffusers import Flux2Pipeline

    pipe = Flux2Pipeline(
        scheduler=scheduler(),
        vae=flux2_vae(),
        text_encoder=mistral3(),
        tokenizer=mistral_processor(),
        transformer=transformer(48, embedded=True),
    )
    return tiny._save(pipe, folder)


def tiny_flux2_klein(folder: Path, *, distilled: bool = False):
    """Make FLUX.2 klein: 32 pixels are 2 by 2 latents of 16 channels; it reads layers 9, 18 and 27."""
    from diffusers import Flux2KleinPipeline

    pipe = Flux2KleinPipeline(
        scheduler=scheduler(),
        vae=flux2_vae(),
        text_encoder=qwen3(27),
        tokenizer=qwen3_tokenizer(),
        transformer=transformer(48, embedded=False),
        is_distilled=distilled,
    )
    return tiny._save(pipe, folder)


def tiny_flux2_klein_distilled(folder: Path):
    """Make a FLUX.2 klein that is distilled to few steps."""
    return tiny_flux2_klein(folder, distilled=True)
