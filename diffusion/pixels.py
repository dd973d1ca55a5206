"""Pixels and latents: what families have in common."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def decode_pictures(pipe: Any, latents: Tensor) -> Tensor:
    """Decode (B, C, h, w) with the pipeline's autoencoder to pixels of about [0, 1]; without one, latents are
    pixels of [-1, 1]."""
    if pipe.vae is None:
        return (latents.float() + 1) / 2
    scaled = latents / pipe.vae.config.scaling_factor + (pipe.vae.config.shift_factor or 0.0)
    return (pipe.vae.decode(scaled.to(pipe.vae.dtype), return_dict=False)[0].float() + 1) / 2


def compress_pictures(pipe: Any, pixels: Tensor) -> Tensor:
    """Undo `decode_pictures` as well as the autoencoder can: the mode of its posterior."""
    signed = 2 * pixels - 1
    if pipe.vae is None:
        return signed
    mode = pipe.vae.encode(signed.to(pipe.vae.dtype), return_dict=False)[0].mode()
    return (mode - (pipe.vae.config.shift_factor or 0.0)) * pipe.vae.config.scaling_factor


def check_size(height: int, width: int, multiple: int) -> None:
    """Refuse sizes that do not divide."""
    if height % multiple or width % multiple or height < 1 or width < 1:
        raise ValueError(
            f"a picture of this model is a multiple of {multiple} pixels high and wide, not {height} x "
            f"{width}"
        )


def check_fits(tokenizer: Any, text: str, limit: int) -> None:
    """Refuse a text that an encoder would cut off."""
    length = len(tokenizer(text, truncation=False, verbose=False).input_ids)
    if length > limit:
        raise ValueError(
            f"it is {length} tokens long, and the encoder '{type(tokenizer).__name__}' takes {limit}; "
            "shorten it, since nothing is cut off in silence"
        )


def dynamic_mu(scheduler: Any, num_tokens: int) -> float | None:
    """Find how far a schedule that depends on the picture's size is shifted, or None where it does not."""
    settings = scheduler.config
    if not settings.get("use_dynamic_shifting", False):
        return None
    low, high = settings.get("base_image_seq_len", 256), settings.get("max_image_seq_len", 4096)
    least, most = settings.get("base_shift", 0.5), settings.get("max_shift", 1.16)
    slope = (most - least) / (high - low)
    return num_tokens * slope + least - slope * low


def num_patches(shape: tuple[int, ...], patch: int) -> int:
    """Count the patches of a latent (C, h, w)."""
    return math.prod(side // patch for side in shape[-2:])


def even_sigmas(num_steps: int) -> Tensor:
    """Space S times evenly from 1 to 1 / S: what many pipelines give their scheduler."""
    return torch.linspace(1.0, 1.0 / num_steps, num_steps)
