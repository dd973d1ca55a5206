"""Latents: packed ones, those of video autoencoders, and guidance."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from einops import rearrange
from torch import Tensor


def check_still(num_frames: int) -> None:
    """Refuse frames of a model that makes pictures."""
    if num_frames != 1:
        raise ValueError(f"this model makes pictures, so `num_frames` must be 1, not {num_frames}")


def pack(latents: Tensor) -> Tensor:
    """Lay 2 by 2 latents side by side as tokens: (B, C, h, w) to (B, h w / 4, 4 C)."""
    return rearrange(latents, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo `pack`: (B, h w / 4, 4 C) to (B, C, height, width), sizes in latents."""
    return rearrange(tokens, "b (h w) (c p q) -> b c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2)


def guided(with_text: Tensor, without: Tensor, guidance: float) -> Tensor:
    """Lead a velocity (B, *L) away from that of the empty text, `guidance` times as far (arXiv
    2207.12598)."""
    return without + guidance * (with_text - without)


def decode_film(vae: Any, latents: Tensor) -> Tensor:
    """Decode (B, C, f, h, w) to frames (B, F, 3, height, width) of about [0, 1] with a video autoencoder,
    which has a mean and a standard deviation for every channel."""
    mean, std = _moments(vae, latents)
    film = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
    return film.transpose(1, 2).float() / 2 + 0.5


def compress_film(vae: Any, frames: Tensor) -> Tensor:
    """Undo `decode_film` as well as the autoencoder can: the mode of its posterior."""
    film = (2 * frames - 1).transpose(1, 2).to(vae.dtype)
    mode = vae.encode(film, return_dict=False)[0].mode()
    mean, std = _moments(vae, mode)
    return (mode - mean) / std


def _moments(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (
        torch.tensor(values).to(like) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)


def default_of(pipe: Any, option: str) -> Any:
    """Read the default of an option that a pipeline is called with."""
    return inspect.signature(type(pipe).__call__).parameters[option].default
