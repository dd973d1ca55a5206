"""Tiny pipelines of Qwen-Image-Edit: real classes, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.diffusion import tiny

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def qwen_vision_tokenizer() -> Any:
    """Make a Qwen tokenizer of single bytes that knows the marks of images."""
    tokenizer = tiny.qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *TOKENS]})
    return tokenizer


def qwen_vision_encoder(tokenizer: Any) -> Any:
    """Make a Qwen2.5-VL that reads texts and images."""
    encoder = tiny.qwen_encoder()
    ids = dict(zip(TOKENS, tokenizer.convert_tokens_to_ids(list(TOKENS)), strict=True))
    encoder.config.vision_start_token_id = ids["<|vision_start|>"]
    encoder.config.vision_end_token_id = ids["<|vision_end|>"]
    encoder.config.image_token_id = ids["<|image_pad|>"]
    encoder.config.video_token_id = ids["<|video_pad|>"]
    return encoder


def tiny_qwen_image_edit(folder: Path, kind: str = "QwenImageEditPipeline") -> Any:
    """Make Qwen-Image-Edit, or another pipeline of its parts: 32 pixels are 4 by 4 latents of 4 channels."""
    import diffusers
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    base = tiny.tiny_qwen_image(folder)
    tokenizer = qwen_vision_tokenizer()
    pipe = getattr(diffusers, kind)(
        scheduler=base.scheduler,
        vae=base.vae,
        text_encoder=qwen_vision_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=Qwen2VLProcessor(
            image_processor=Qwen2VLImageProcessor(),
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(),
        ),
        transformer=base.transformer,
    )
    pipe.save_pretrained(folder, safe_serialization=True)
    return tiny.load(folder)


def tiny_qwen_image_edit_plus(folder: Path) -> Any:
    """Make the version for several images."""
    return tiny_qwen_image_edit(folder, "QwenImageEditPlusPipeline")
