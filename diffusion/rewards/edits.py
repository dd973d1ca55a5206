"""Rewards of edited images that compare the source image with the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Media, Outcome, Prompt
from mmrl.diffusion.reward_base import encode_distinct, images_of
from mmrl.rewards.frames import mean_over_frames
from mmrl.runtime.clip_model import load_towers

OF_EDITS = RewardInputs(VISUAL, source=True)


def source_media(prompt: Prompt, reward: str) -> Media:
    """Return the source image of an edit, the first medium of its prompt; ValueError without one."""
    if not prompt.media:
        raise ValueError(f"{reward} compares with the source image, but prompt '{prompt.uid}' has none")
    return prompt.media[0]


def source_of(prompt: Prompt, reward: str) -> Tensor:
    """Decode the source image of an edit, (3, height, width) uint8."""
    return source_media(prompt, reward).load().pixels[0]


def _captioned(before: str, after: str) -> RewardInputs:
    return RewardInputs(VISUAL, source=True, texts=(before, after))


@reward(packages={"open_clip": "clip"}, inputs=_captioned)
class ClipDirection:
    """CLIP directional similarity of an edit (StyleGAN-NADA, arXiv 2108.00946), from -1 to 1.

    The reward is the cosine of two differences of unit embeddings: edited image minus source image, and
    edited caption minus source caption. It is 0 if the image or the caption does not change.

    Args:
        before: Column with the caption of the source image, as in InstructPix2Pix' data (arXiv 2211.09800).
        after: Column with the caption of the edited image.
        model: Architecture of open_clip, or a folder, as for `clip_score`.
        pretrained: Tag or file of weights for an architecture; null is `openai`.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        batch_size: Number of images or texts per forward pass.
        device: Device of the model; `auto` is the current GPU, or else the CPU.
    """

    def __init__(
        self,
        *,
        before: str = "original_prompt",
        after: str = "edited_prompt",
        model: str = "ViT-L-14",
        pretrained: str | None = None,
        frames: PositiveInt = 8,
        batch_size: PositiveInt = 32,
        device: str = "auto",
    ) -> None:
        self.columns, self.frames, self.batch_size = (before, after), frames, batch_size
        self.towers = load_towers(model, pretrained, device)

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome."""
        return mean_over_frames(self.score_images, prompts, outcomes, self.frames)

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        images = [source_of(prompt, "clip_direction") for prompt in prompts] + images_of(prompts, outcomes)
        captions = [self._caption(prompt, column) for column in self.columns for prompt in prompts]
        image_before, image_after = self._pair(encode_distinct(self.towers.look, images, self.batch_size))
        text_before, text_after = self._pair(encode_distinct(self.towers.read, captions, self.batch_size))
        turns = normalize(image_after - image_before, dim=-1), normalize(text_after - text_before, dim=-1)
        return (turns[0] * turns[1]).sum(-1).tolist()

    def _pair(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Stack 2 N vectors (D,) to two tensors (N, D), of the first N and of the last N vectors."""
        width = rows[0].shape[-1] if rows else 1
        return tuple(torch.cat([torch.zeros(0, width), *(row[None] for row in rows)]).view(2, -1, width))

    def _caption(self, prompt: Prompt, column: str) -> str:
        caption = prompt.columns.get(column)
        if not isinstance(caption, str) or not caption.strip():
            raise ValueError(
                f"clip_direction needs the captions before and after the edit in the columns "
                f"'{self.columns[0]}' and '{self.columns[1]}'; prompt '{prompt.uid}' has {caption!r} in "
                f"'{column}', and the columns {', '.join(prompt.columns)}"
            )
        return caption


@reward(inputs=RewardInputs(VISUAL, source=True, optional=("mask",)))
def unmasked_identity(
    prompts: Sequence[Prompt], outcomes: Sequence[Outcome], *, frames: PositiveInt = 8
) -> list[float | None]:
    """Similarity of an edited image to its source outside the mask, in [0, 1].

    The value is 1 minus the mean absolute difference of pixel values in [0, 1] where the prompt's `mask`
    (`diffusion.edits`) is darker than half. Source and mask are resized to the result. The value is None if a
    prompt has no mask, or its mask covers the whole image.

    Args:
        frames: Number of evenly spaced frames of a video to compare; the reward is the mean over them.
    """

    def score(prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        return [
            _identity(prompt, image)
            for prompt, image in zip(prompts, images_of(prompts, outcomes), strict=True)
        ]

    return mean_over_frames(score, prompts, outcomes, frames)


def _identity(prompt: Prompt, image: Tensor) -> float | None:
    mask = prompt.columns.get("mask")
    if not isinstance(mask, Media):
        return None
    size = image.shape[-2:]
    source = source_of(prompt, "unmasked_identity").double() / 255
    if source.shape[-2:] != size:
        source = interpolate(source[None], size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    kept = mask.load().pixels[:1].double().mean(1, keepdim=True) / 255  # (1, 1, height, width)
    kept = interpolate(kept, size, mode="area")[0, 0] < 0.5
    if not kept.any():
        return None
    return 1 - float((image.double() / 255 - source).abs()[:, kept].mean())
