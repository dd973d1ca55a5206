"""Latents of image and video autoencoders: shapes, packing, guidance, decoding and encoding."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor


def check_size(height: int, width: int, multiple: int) -> None:
    """Raise unless height and width are positive multiples of `multiple` pixels."""
    if height % multiple or width % multiple or height < 1 or width < 1:
        raise ValueError(
            f"an image of this model is a multiple of {multiple} pixels high and wide, not {height} x {width}"
        )


def image_latent_shape(
    channels: int, factor: int, patch: int, size: tuple[int, int], num_frames: int
) -> tuple[int, int, int]:
    """Compute the latent shape (C, h, w) of an image model and check the requested pixel size.

    `factor` is how much the autoencoder shrinks a side, `patch` the side of the network's patches in latents,
    `size` the (height, width) of the image in pixels.
    """
    if num_frames != 1:
        raise ValueError(f"this model makes images, so `num_frames` must be 1, not {num_frames}")
    check_size(*size, factor * patch)
    return channels, size[0] // factor, size[1] // factor


def pack(latents: Tensor) -> Tensor:
    """Pack 2 x 2 latents into one token: (B, C, h, w) to (B, h w / 4, 4 C)."""
    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack`: (B, h w / 4, 4 C) to (B, C, height, width), sizes in latents."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2)


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Apply classifier-free guidance to velocities (B, *L) (arXiv 2207.12598)."""
    return without + guidance * (with_text - without)


def decode_images(vae: Any, latents: Tensor) -> Tensor:
    """Decode (B, C, h, w) latents to pixels of about [0, 1], in float32.

    Without an autoencoder (`vae` is None) latents are pixels in [-1, 1].
    """
    if vae is None:
        return (latents.float() + 1) / 2
    scaled = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
    return (vae.decode(scaled.to(vae.dtype), return_dict=False)[0].float() + 1) / 2


def encode_images(vae: Any, pixels: Tensor) -> Tensor:
    """Encode pixels (B, 3, height, width) in [0, 1] to latents: the mode of the posterior, not a sample."""
    signed = 2 * pixels - 1
    if vae is None:
        return signed
    mode = vae.encode(signed.to(vae.dtype), return_dict=False)[0].mode()
    return (mode - (vae.config.get("shift_factor") or 0.0)) * vae.config.scaling_factor


def decode_videos(vae: Any, latents: Tensor) -> Tensor:
    """Decode (B, C, f, h, w) latents to frames (B, F, 3, height, width) of about [0, 1], in float32.

    Video autoencoders standardise every channel by a mean and a standard deviation of its own.
    """
    mean, std = _channel_moments(vae, latents)
    frames = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
    return frames.transpose(1, 2).float() / 2 + 0.5


def encode_videos(vae: Any, frames: Tensor) -> Tensor:
    """Encode frames (B, F, 3, height, width) in [0, 1] to latents: the mode of the posterior."""
    mode = vae.encode((2 * frames - 1).transpose(1, 2).to(vae.dtype), return_dict=False)[0].mode()
    mean, std = _channel_moments(vae, mode)
    return (mode - mean) / std


def _channel_moments(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Read mean and standard deviation per latent channel, (C, 1, 1, 1) each."""
    moments = torch.tensor([vae.config.latents_mean, vae.config.latents_std]).to(like)
    return tuple(moments.view(2, -1, 1, 1, 1))
