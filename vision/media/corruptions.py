"""Prompts that show less than they should: without their pictures, with a scrap of them, or with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmrl.core.types import Frames, Media, Part, Prompt

NOISE_STEPS = 1000
TRIES = 10  # draws of a shape that fits, as torchvision's random crop has it


def without_media(prompt: Prompt) -> Prompt:
    """Take every picture and clip out of a prompt, with its placeholder."""
    messages = []
    for message in prompt.messages:
        words = tuple(part for part in message.parts if part.media is None)
        messages.append(replace(message, parts=words or (Part(""),)))
    return replace(prompt, messages=tuple(messages))


def map_frames(prompt: Prompt, spoil: Callable[[Frames], Frames]) -> Prompt:
    """Show other frames in the places of a prompt's media."""

    def other(media: Media) -> Media:
        return replace(media, load=lambda: spoil(media.load()))

    return replace(
        prompt,
        messages=tuple(
            replace(
                message,
                parts=tuple(
                    part if part.media is None else replace(part, media=other(part.media))
                    for part in message.parts
                ),
            )
            for message in prompt.messages
        ),
    )


def random_crop(frames: Frames, generator: torch.Generator, scale: tuple[float, ...]) -> Frames:
    """Cut a random part out of frames and enlarge it to their size: a share of the area drawn from `scale`,
    and a shape between 3:4 and 4:3 (mDPO, arXiv 2406.11839). All frames are cut alike."""
    height, width = frames.pixels.shape[-2:]
    top, left, tall, wide = _box(height, width, generator, scale)
    part = frames.pixels[..., top : top + tall, left : left + wide].float()
    whole = interpolate(part, (height, width), mode="bicubic", antialias=True)
    return replace(frames, pixels=whole.round().clamp(0, 255).to(torch.uint8))


def _box(
    height: int, width: int, generator: torch.Generator, scale: tuple[float, ...]
) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a part."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    for _ in range(TRIES):
        area = height * width * between(scale[0], scale[1])
        shape = math.exp(between(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = max(1, round(math.sqrt(area * shape))), max(1, round(math.sqrt(area / shape)))
        if wide <= width and tall <= height:
            return int(between(0, height - tall + 1)), int(between(0, width - wide + 1)), tall, wide
    side = max(1, min(height, width, round(math.sqrt(height * width * scale[1]))))
    return (height - side) // 2, (width - side) // 2, side, side


def add_noise(values: Tensor, generator: torch.Generator, noise_step: int) -> Tensor:
    """Send normalised pixels along a diffusion of 1000 steps, to the one wanted (VCD, arXiv 2311.16922)."""
    rate = torch.sigmoid(torch.linspace(-6, 6, NOISE_STEPS)) * (0.5e-2 - 1e-5) + 1e-5
    kept = float((1 - rate).cumprod(0)[noise_step])
    noise = torch.randn(values.shape, generator=generator).to(values)
    return math.sqrt(kept) * values + math.sqrt(1 - kept) * noise


def add_frame_noise(frames: Frames, generator: torch.Generator, noise_step: int) -> Frames:
    """Put VCD's noise on frames. Our reading: on pixels between -1 and 1, cut off there."""
    values = add_noise(frames.pixels.float() / 127.5 - 1, generator, noise_step)
    return replace(frames, pixels=((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
