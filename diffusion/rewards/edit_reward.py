"""EditReward, a preference model of edited images on Qwen2.5-VL (arXiv 2509.26346)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import images_of
from mmrl.diffusion.rewards.edits import OF_EDITS, source_of
from mmrl.diffusion.rewards.qwen_scorer import PIXELS, Dtype, ScoredImages, load_scorer, mlp_head, resize

PROMPTS = ("edit_reward_following", "edit_reward_quality")


@reward(inputs=OF_EDITS)
class EditReward(ScoredImages):
    """Predicted preference of an edit for its source and instruction, by Qwen2.5-VL (arXiv 2509.26346).

    The model reads source and result in two published prompts, one about following the instruction and one
    about quality. Each prompt has its own head, which reads the hidden state of the token <|Reward|>. The
    reward is the mean of the two predicted means.

    Args:
        weights: Published weights: a file, or `owner/name:file` of the hub.
        model: Folder or hub id of the base model of these weights, a Qwen2.5-VL.
        pixels: Number of pixels to which every image is resized; the published number is 256 * 28 * 28.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        dtype: Precision of the base model; released in bfloat16.
        batch_size: Number of pairs of images per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        *,
        weights: str = "TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508:model.safetensors",
        model: str = "XiaomiMiMo/MiMo-VL-7B-SFT-2508",
        pixels: PositiveInt = PIXELS,
        frames: PositiveInt = 8,
        dtype: Dtype = "bfloat16",
        batch_size: PositiveInt = 8,
        device: str = "auto",
    ) -> None:
        heads = lambda width: {"rm_heads": nn.ModuleDict({f"head_{i}": mlp_head(width) for i in range(2)})}
        self.scorer = load_scorer("edit_reward", weights, model, dtype, device, ("<|Reward|>",), heads)
        self.pixels, self.frames, self.batch_size = pixels, frames, batch_size

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        sources = [source_of(prompt, "edit_reward") for prompt in prompts]
        results = images_of(prompts, outcomes)
        pairs = [
            [resize(image, self.pixels) for image in pair] for pair in zip(sources, results, strict=True)
        ]
        means = []
        for prompt, head in zip(PROMPTS, self.scorer.rm_heads.values(), strict=True):
            texts = self.scorer.texts(prompt, [prompt.text for prompt in prompts])
            states = self.scorer(texts, "image", pairs, self.batch_size)
            means.append(head(states[:, 0].float())[:, 0])
        return torch.stack(means).mean(0).tolist()
