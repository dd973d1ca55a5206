"""VideoAlign's VideoReward, a preference model of videos on Qwen2-VL (arXiv 2501.13918)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.config.ranges import PositiveFloat, PositiveInt
from mmrl.config.registry import reward
from mmrl.core.reward_inputs import RewardInputs
from mmrl.core.tensor import linspace_indices
from mmrl.core.types import Outcome, Prompt
from mmrl.diffusion import reward_base as base
from mmrl.diffusion.rewards.qwen_scorer import Dtype, QwenScorer, Scored, renamed
from mmrl.rewards.frames import frame_rate
from mmrl.runtime.modules import DTYPES

AXES = ("VQ", "MQ", "TA")  # visual quality, motion quality, text alignment
TOKENS = tuple(f"<|{axis}_reward|>" for axis in AXES)
MIN_PIXELS = 128 * 28 * 28  # per frame; the maximum is in the published configuration
FEWEST, MOST = 4, 768  # minimum and maximum number of frames


@reward(inputs=RewardInputs(frozenset({"video"}), min_frames=2))
class VideoAlign(Scored):
    """Predicted preference of a video for its prompt, by VideoReward on Qwen2-VL (arXiv 2501.13918).

    A linear head reads the hidden states of three tokens in the published prompt: visual quality, motion
    quality and text alignment. Each score is standardised by the published mean and deviation: 0 is average.
    LoRA weights are merged into the base weights; the released code adds LoRA's output in every layer.

    Args:
        weights: `model.pth` of a checkpoint: a file, or `owner/name:file` of the hub.
        config: `model_config.json` of the same release: a file, or `owner/name:file`. Frame rate, frame size,
            scale of the adapter, means and deviations are read from this file.
        model: Folder or hub id of the base model.
        axis: `VQ`, `MQ` or `TA`, or `Overall`, their sum.
        fps: Frames per second that the model sees; null is the published rate, 2.
        dtype: Precision of model and head; released in bfloat16.
        batch_size: Number of videos per forward pass.
        device: Device of the model; `auto` is the GPU if there is one, else the CPU.
    """

    def __init__(
        self,
        *,
        weights: str = "KwaiVGI/VideoReward:checkpoint-11352/model.pth",
        config: str = "KwaiVGI/VideoReward:model_config.json",
        model: str = "Qwen/Qwen2-VL-2B-Instruct",
        axis: Literal["Overall", "VQ", "MQ", "TA"] = "Overall",
        fps: PositiveFloat | None = None,
        dtype: Dtype = "bfloat16",
        batch_size: PositiveInt = 4,
        device: str = "auto",
    ) -> None:
        published = read_config(config)
        self.norm, self.max_pixels = published["norm"], published["max_pixels"]
        self.axis, self.fps, self.batch_size = axis, fps or published["fps"], batch_size
        load = lambda: load_scorer(weights, model, DTYPES[dtype], published["lora_scale"])
        loaded = base.shared_model("video_align", device, load, weights, config, model, dtype)
        assert isinstance(loaded, QwenScorer)
        self.scorer = loaded

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Compute the reward of every video."""
        texts = self.scorer.texts("video_align", [prompt.text for prompt in prompts])
        videos = [[self._video(*both)] for both in zip(prompts, outcomes, strict=True)]
        states = self.scorer(texts, "video", videos, self.batch_size)
        values = self.scorer.rm_head(states.to(self.scorer.rm_head.weight.dtype)).double()  # (N, 3, 3 or 1)
        values = values.diagonal(dim1=1, dim2=2) if values.shape[2] > 1 else values[..., 0]
        means, deviations = values.new_tensor(self.norm)
        values = (values - means) / deviations
        return (values.sum(1) if self.axis == "Overall" else values[:, AXES.index(self.axis)]).tolist()

    def _video(self, prompt: Prompt, outcome: Outcome) -> Tensor:
        """Select as many frames as the released code, and resize them: (F, 3, height, width) uint8."""
        from torchvision.transforms.functional import InterpolationMode
        from torchvision.transforms.functional import resize as resize_frames
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        if outcome.video is None or len(outcome.video) < 2:
            raise ValueError(
                f"video_align scores videos of at least 2 frames; '{prompt.uid}' has another outcome"
            )
        video = base.frames_of(prompt, outcome)
        count = num_frames(len(video), frame_rate(prompt, outcome), self.fps)
        video = video[linspace_indices(len(video), count)]
        size = smart_resize(*video.shape[2:], factor=28, min_pixels=MIN_PIXELS, max_pixels=self.max_pixels)
        return resize_frames(video.cpu(), list(size), InterpolationMode.BICUBIC, antialias=True)


def num_frames(total: int, rate: float, fps: float) -> int:
    """Return the even number of frames that the released code samples from `total` at `rate` per second."""
    count = min(max(total / rate * fps, FEWEST), min(MOST, total) // 2 * 2)
    return round(count / 2) * 2


def read_config(name: str) -> dict[str, Any]:
    """Read the `model_config.json` of a release; raises ValueError for another variant of the model."""
    path = base.find_weights("video_align", name)
    with base.explained(
        f"video_align: '{path}' is no model_config.json of VideoReward", errors=(KeyError, ValueError)
    ):
        file = json.loads(path.read_text("utf-8"))
        data, model, norm = file["data_config"], file["model_config"], file["inference_config"]
        form = (data["prompt_template_type"], data["sample_type"], model["use_special_tokens"])
        if form != ("detailed_special", "uniform", True) or data.get("num_frames"):
            raise ValueError(
                f"it is for prompts, frames and tokens {form}, which are not those of the release"
            )
        return {
            "fps": float(data["fps"]),
            "max_pixels": int(data["max_frame_pixels"]),
            "norm": [[float(norm[f"{axis}_{part}"]) for axis in AXES] for part in ("mean", "std")],
            "lora_scale": lora_scale(file["peft_lora_config"]),
        }


def lora_scale(peft: Mapping[str, Any]) -> float:
    """Return the factor of a LoRA update: alpha over rank, or over the root of the rank with rsLoRA."""
    rank = peft["lora_r"]
    return peft["lora_alpha"] / (rank**0.5 if peft.get("use_rslora") else rank)


def load_scorer(weights: str, model: str, dtype: torch.dtype, scale: float) -> QwenScorer:
    """Load a scorer: read its weights, merge the LoRA adapter, and take the head's size from the weights."""
    state = renamed("video_align", base.read_weights("video_align", weights), scale)
    head = state.get("rm_head.weight")
    if head is None or head.dim() != 2 or len(head) not in (1, len(AXES)):
        raise ValueError(f"video_align: '{weights}' has no `rm_head.weight` with 1 or 3 rows")
    heads = lambda width: {"rm_head": nn.Linear(width, len(head), bias=False)}
    return QwenScorer("video_align", model, state, TOKENS, heads, dtype, dtype)
