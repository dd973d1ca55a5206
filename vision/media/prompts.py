"""Prompts with media: construction, recorded answers, and corrupted versions of their images."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmrl.core.types import Frames, Media, Message, Outcome, Part, Prompt
from mmrl.data.fields import RowError, is_number, listed, short, text, unpacked
from mmrl.data.media_root import MediaRoot

NOISE_STEPS = 1000
TRIES = 10  # attempts to find a box that fits, as in torchvision's RandomResizedCrop
log = logging.getLogger("mmrl")


def ask(uid: str, media: Sequence[Media], question: str, target: Any, columns: Mapping[str, Any]) -> Prompt:
    """Create a prompt of one user message with media and a question."""
    message = Message("user", (*(Part(media=medium) for medium in media), Part(question)))
    return Prompt(uid, (message,), target, columns=columns)


def with_answers(prompts: Sequence[Prompt], answers: Mapping[str, str], source: str) -> list[Prompt]:
    """Attach recorded answers, keyed by prompt id, to prompts.

    Drops prompts without an answer and logs their number; raises ValueError for an answer without a prompt.
    """
    unknown = sorted(set(answers) - {prompt.uid for prompt in prompts})
    if unknown:
        raise ValueError(f"'{source}' answers {len(unknown)} unknown prompts, such as '{unknown[0]}'")
    answered = [p for p in prompts if p.uid in answers]
    if len(answered) < len(prompts):
        counts = len(answered), len(prompts)
        log.warning("'%s' answers %d of %d prompts; the others are left out", source, *counts)
    return [replace(prompt, answers=(Outcome(text=answers[prompt.uid]),)) for prompt in answered]


def root_of(root: str, answers: str, what: str) -> MediaRoot:
    """Return the folder of the images of benchmark `what`; an empty `root` needs recorded `answers`."""
    if not root and not answers:
        raise ValueError(f"{what}: name the folder of the images (`root`), or recorded `answers`")
    return MediaRoot(Path(root))


def answers_of(columns: Mapping[str, Any]) -> str | tuple[str, ...]:
    """Read a row's reference answer from the column `answer`, or several from the column `answers`."""
    name = "answers" if columns.get("answer") is None and columns.get("answers") is not None else "answer"
    given = columns.get(name)
    match unpacked(given) if name == "answers" else given:
        case []:
            raise RowError(f"wanted at least one answer as `{name}`, got {short(columns[name])}")
        case [*values]:
            return tuple(answer_of(value, f"{name}[{i}]") for i, value in enumerate(values))
        case int() as place if place in _contested(columns.get("choices")):
            return ascii_uppercase[place]
        case value:
            return answer_of(value, name)


def _contested(choices: Any) -> list[int]:
    """List the numbers that are the index of one choice and the text of another; they count as indices."""
    texts = choices if isinstance(choices, list) and all(type(choice) is str for choice in choices) else []
    return [
        place for place in range(min(len(texts), 26)) if str(place) in texts and texts[place] != str(place)
    ]


def answer_of(value: Any, name: str) -> str:
    """Convert a text, a number, a boolean (yes, no) or an answer of VQAv2 to a text."""
    if isinstance(value, Mapping) and "answer" in value:  # VQAv2: a mapping with confidence and annotator
        value = value["answer"]
    if value is True or value is False:
        return "yes" if value else "no"
    return str(value) if is_number(value) else text(value, name)


def lettered(choices: Any) -> list[str]:
    """Format the choices of a question as lines like `A. a cat`; raises RowError for more than 26."""
    texts = [answer_of(choice, f"choices[{i}]") for i, choice in enumerate(listed(choices, "choices"))]
    if len(texts) > len(ascii_uppercase):
        raise RowError(f"wanted at most {len(ascii_uppercase)} `choices`, one a letter, got {len(texts)}")
    return [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, texts, strict=False)]


# ---- corrupted versions: without media, with a random crop, or with diffusion noise


def map_parts(prompt: Prompt, change: Callable[[tuple[Part, ...]], tuple[Part, ...]]) -> Prompt:
    """Apply a function to the parts of every message."""
    messages = (replace(message, parts=change(message.parts)) for message in prompt.messages)
    return replace(prompt, messages=tuple(messages))


def without_media(prompt: Prompt) -> Prompt:
    """Remove all media and their placeholders from a prompt."""
    return map_parts(prompt, lambda parts: tuple(p for p in parts if p.media is None) or (Part(""),))


def map_frames(prompt: Prompt, change: Callable[[Frames], Frames]) -> Prompt:
    """Apply a function to the frames of every image and video of a prompt at load time."""
    return map_media(prompt, Frames, change)


def map_media(prompt: Prompt, of: type, change: Callable[[Any], Any]) -> Prompt:
    """Apply a function to every decoded medium of the type `of` (`Frames`, `Sound`) at load time."""

    def changed(media: Media) -> Media:
        def load() -> Any:
            loaded = media.load()
            return change(loaded) if isinstance(loaded, of) else loaded

        return replace(media, load=load)

    return map_parts(
        prompt, lambda parts: tuple(replace(p, media=p.media and changed(p.media)) for p in parts)
    )


def random_crop(frames: Frames, generator: torch.Generator, scale: tuple[float, ...]) -> Frames:
    """Crop all frames to one random box, resized to the size of the frames (mDPO, arXiv 2406.11839).

    The area of the box is a random fraction between the two values of `scale`, its aspect ratio 3:4 to 4:3.
    """
    height, width = frames.pixels.shape[-2:]

    # Do not use torchvision's crop, which uses the global random generator.
    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    for _ in range(TRIES):
        area = height * width * between(scale[0], scale[1])
        aspect = math.exp(between(math.log(3 / 4), math.log(4 / 3)))  # log-uniform distribution
        wide, tall = max(1, round(math.sqrt(area * aspect))), max(1, round(math.sqrt(area / aspect)))
        if wide <= width and tall <= height:
            top, left = int(between(0, height - tall + 1)), int(between(0, width - wide + 1))
            break
    else:
        # No box fitted: use the largest allowed square in the middle.
        wide = tall = max(1, min(height, width, round(math.sqrt(height * width * scale[1]))))
        top, left = (height - tall) // 2, (width - wide) // 2
    part = frames.pixels[..., top : top + tall, left : left + wide].float()
    whole = interpolate(part, (height, width), mode="bicubic", antialias=True)
    return replace(frames, pixels=whole.round().clamp(0, 255).to(torch.uint8))  # bicubic overshoots at edges


def add_noise(values: Tensor, generator: torch.Generator, noise_step: int) -> Tensor:
    """Add the noise of one step of a 1000-step diffusion to normalised pixels (VCD, arXiv 2311.16922)."""
    # Schedule of VCD: betas rise from 1e-5 to 5e-3 along a sigmoid; x_t = sqrt(a) x_0 + sqrt(1 - a) n.
    beta = torch.sigmoid(torch.linspace(-6, 6, NOISE_STEPS)) * (0.5e-2 - 1e-5) + 1e-5
    signal = float((1 - beta).cumprod(0)[noise_step])
    noise = torch.randn(values.shape, generator=generator).to(values)  # on the CPU, where the generator is
    return math.sqrt(signal) * values + math.sqrt(1 - signal) * noise


def add_frame_noise(frames: Frames, generator: torch.Generator, noise_step: int) -> Frames:
    """Add VCD's noise to frames. Our reading: scale pixels to [-1, 1], add noise, clamp to that range."""
    values = add_noise(frames.pixels.float() / 127.5 - 1, generator, noise_step)
    return replace(frames, pixels=((values + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))


def add_gaussian_noise(frames: Frames, generator: torch.Generator, sigma: float) -> Frames:
    """Add independent Gaussian noise to every value of every frame.

    `sigma` is the standard deviation for pixels scaled to [-1, 1]; results are clamped to that range.
    """
    noise = torch.randn(frames.pixels.shape, generator=generator) * (sigma * 127.5)
    return replace(frames, pixels=(frames.pixels.float() + noise).round().clamp(0, 255).to(torch.uint8))
