"""Reward: the score of a trained reward model that reads texts, images and videos."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mmrl.config.loading import ConfigError
from mmrl.config.ranges import PositiveInt
from mmrl.config.registry import find, reward
from mmrl.core.types import Outcome, Prompt
from mmrl.runtime.modules import loading_onto, reward_device

LOCK = threading.Lock()  # parallel rewards may share one model


class Scorer:
    """A frozen reward model with a cache of its latest scores, shared by the rewards of all its labels."""

    def __init__(self, options: dict[str, Any], device: str) -> None:
        with loading_onto(torch.device(device), learns=False):
            self.policy: Any = find("policy", "vision.reward_model").target(frozen=True, **options)
        self.policy.module.to(device)
        self.last: tuple[list[Any], Tensor] = [], torch.empty(0)

    @torch.no_grad()
    def scores(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome], batch_size: int) -> Tensor:
        """Return the scores (N, labels) of answers; a repetition of the last call reads the cache."""
        both = list(zip(prompts, outcomes, strict=True))
        known, values = self.last
        if [(id(a), id(b)) for a, b in known] != [(id(a), id(b)) for a, b in both]:
            values = self.policy.scores([self.policy.encode(*one) for one in both], batch_size)
            self.last = both, values
        return values


_LOADED: WeakValueDictionary[tuple, Scorer] = WeakValueDictionary()


@reward
class RewardModel:
    """Score answers with a trained reward model, as `vision.reward_model` saves it.

    The model reads the prompt with its images and videos, and the answer: a text, an image or a video. For a
    model with several labels, use one reward per label; they share the model and its forward passes, and
    `total` adds them with their weights.

    Args:
        model: Folder or hub id of the reward model, or of the base of its adapter.
        adapter: Folder of the saved adapter with its `score.safetensors`; empty: none.
        of: Label whose score is the reward; empty: the only score.
        dtype: Precision of the model.
        attn_implementation: Attention of transformers.
        min_pixels: Minimal pixels of an image after the image processor; None: the processor's default.
        max_pixels: Maximal pixels of an image after the image processor; None: the processor's default.
        batch_size: Answers per forward pass.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str,
        adapter: str = "",
        of: str = "",
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
        min_pixels: PositiveInt | None = None,
        max_pixels: PositiveInt | None = None,
        batch_size: PositiveInt = 8,
        device: str = "auto",
    ) -> None:
        options = {"model": model, "adapter": adapter, "dtype": dtype, "min_pixels": min_pixels}
        options |= {"attn_implementation": attn_implementation, "max_pixels": max_pixels}
        place, key = reward_device(device), (*options.values(), reward_device(device))
        with LOCK:
            if (scorer := _LOADED.get(key)) is None:
                scorer = _LOADED[key] = Scorer(options, place)
        if not scorer.policy.saved:
            raise ConfigError(f"'{model}' is no reward model: it has no layer that computes a score")
        labels = scorer.policy.labels
        if of not in (labels or ("",)):
            raise ConfigError(
                f"the reward model '{adapter or model}' has the labels {', '.join(labels) or 'none'}; set "
                f"`of` to one of them, not '{of}'"
                if labels
                else f"the reward model '{adapter or model}' has one score without a name; leave `of` out"
            )
        self.scorer, self.column, self.batch_size = scorer, labels.index(of) if of else 0, batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float]:
        """Return the score of every answer."""
        with LOCK:
            return self.scorer.scores(prompts, outcomes, self.batch_size)[:, self.column].tolist()
