"""Corrupted versions of prompts: without media, with a random crop, or with diffusion noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmrl.core.types import Frames, Media, Part, Prompt

NOISE_STEPS = 1000
TRIES = 10  # draws of a box that fits, as in torchvision's RandomResizedCrop


def without_media(prompt: Prompt) -> Prompt:
    """Remove all images and videos, with their placeholders, from a prompt."""
    messages = []
    for message in prompt.messages:
        texts = tuple(part for part in message.parts if part.media is None)
        messages.append(replace(message, parts=texts or (Part(""),)))
    return replace(prompt, messages=tuple(messages))


def map_frames(prompt: Prompt, change: Callable[[Frames], Frames]) -> Prompt:
    """Apply a function to the frames of every image and video of a prompt, when they are loaded."""

    def changed(media: Media) -> Media:
        return replace(media, load=lambda: change(media.load()))

    messages = []
    for message in prompt.messages:
        parts = (replace(part, media=part.media and changed(part.media)) for part in message.parts)
        messages.append(replace(message, parts=tuple(parts)))
    return replace(prompt, messages=tuple(messages))


def random_crop(frames: Frames, generator: torch.Generator, scale: tuple[float, ...]) -> Frames:
    """Cut a random box out of all frames and enlarge it to their size (mDPO, arXiv 2406.11839).

    The box has a share of the area drawn from `scale` (low, high), and an aspect ratio between 3:4 and 4:3.
    """
    height, width = frames.pixels.shape[-2:]

    # torchvision draws from the global generator, which a keyed stream must not depend on.
    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    for _ in range(TRIES):
        area = height * width * between(scale[0], scale[1])
        aspect = math.exp(between(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = max(1, round(math.sqrt(area * aspect))), max(1, round(math.sqrt(area / aspect)))
        if wide <= width and tall <= height:
            top, left = int(between(0, height - tall + 1)), int(between(0, width - wide + 1))
            break
    else:
        wide = tall = max(1, min(height, width, round(math.sqrt(height * width * scale[1]))))
        top, left = (height - tall) // 2, (width - wide) // 2
    part = frames.pixels[..., top : top + tall, left : left + wide].float()
    whole = interpolate(part, (height, width), mode="bicubic", antialias=True)
    return replace(frames, pixels=whole.round().clamp(0, 255).to(torch.uint8))


def add_noise(values: Tensor, generator: torch.Generator, noise_step: int) -> Tensor:
    """Noise normalised pixels to one step of a 1000-step diffusion (VCD, arXiv 2311.16922)."""
    # The schedule of VCD: betas rise from 1e-5 to 5e-3 along a sigmoid; x_t = sqrt(a) x_0 + sqrt(1 - a) n.
    beta = torch.sigmoid(torch.linspace(-6, 6, NOISE_STEPS)) * (0.5e-2 - 1e-5) + 1e-5
    signal = float((1 - beta).cumprod(0)[noise_step])
    noise = torch.randn(values.shape, generator=generator).to(values)
    return math.sqrt(signal) * values + math.sqrt(1 - signal) * noise


def add_frame_noise(frames: Frames, generator: torch.Generator, noise_step: int) -> Frames:
    """Apply VCD's noise to frames. Our reading: to pixels scaled to [-1, 1], clamped to that range."""
    values = add_noise(frames.pixels.float() / 127.5 - 1, generator, noise_step)
    return replace(frames, pixels=((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
