"""HPSv3, a preference model of images on Qwen2-VL (arXiv 2508.03789)."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import VISUAL, RewardInputs
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion.reward_base import images_of
from mmrl.diffusion.rewards.qwen_scorer import PIXELS, Dtype, ScoredImages, load_scorer, mlp_head, resize


@reward(inputs=RewardInputs(VISUAL))
class Hpsv3(ScoredImages):
    """Predicted preference of an image for its prompt, by Qwen2-VL and a small network (arXiv 2508.03789).

    The network reads the hidden state of the token <|Reward|> in the published prompt. The reward is the
    first of the network's two outputs, the predicted mean; the second is the predicted deviation.

    Args:
        weights: `HPSv3.safetensors`: a file, or `owner/name:file` of the hub.
        model: Folder or hub id of the base model.
        pixels: Number of pixels to which every image is resized; the published number is 256 * 28 * 28.
        frames: Number of evenly spaced frames of a video to score; the reward is the mean over them.
        dtype: Precision of the base model; released in bfloat16.
        batch_size: Number of images per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        *,
        weights: str = "MizzenAI/HPSv3:HPSv3.safetensors",
        model: str = "Qwen/Qwen2-VL-7B-Instruct",
        pixels: PositiveInt = PIXELS,
        frames: PositiveInt = 8,
        dtype: Dtype = "bfloat16",
        batch_size: PositiveInt = 8,
        device: str = "auto",
    ) -> None:
        heads = lambda width: {"rm_head": mlp_head(width)}
        self.scorer = load_scorer("hpsv3", weights, model, dtype, device, ("<|Reward|>",), heads)
        self.pixels, self.frames, self.batch_size = pixels, frames, batch_size

    def score_images(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every image."""
        texts = self.scorer.texts("hpsv3", [prompt.text for prompt in prompts])
        images = [[resize(image, self.pixels)] for image in images_of(prompts, outcomes)]
        states = self.scorer(texts, "image", images, self.batch_size)
        return self.scorer.rm_head(states[:, 0].float())[:, 0].tolist()
