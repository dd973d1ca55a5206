"""Reference policies that load a vision-language model of their own: teachers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from mmrl.config.loading import ConfigError
from mmrl.config.registry import reference
from mmrl.core.step_table import Batch, StepOutput
from mmrl.core.tensor import pad_to
from mmrl.vision.models import loading


@reference
class Teacher:
    """Another, frozen vision-language model: the teacher of on-policy distillation.

    It computes log-probabilities of the policy's tokens. Raises `ValueError` if its tokenizer or its
    architecture differs from the policy's. Every process holds the whole model.

    Args:
        model: Hub id or folder of the teacher.
        dtype: Precision of the weights and of the computation.
        attn_implementation: Attention of transformers, such as "sdpa", "eager" or "flash_attention_2".
    """

    decay = 1.0  # fraction of the old weights that an update keeps
    holds = "a model"  # what the reference adds to memory, for memory estimates

    def __init__(
        self,
        policy: Any,  # `vision.tokens`
        *,
        model: str,
        dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16",
        attn_implementation: str = "sdpa",
    ) -> None:
        tokenizer = loading.load_processor(model).tokenizer
        loaded = loading.load_model(model, dtype=dtype, attn_implementation=attn_implementation)
        loading.check_same_tokens(tokenizer, loaded, policy)
        device = next(policy.module.parameters()).device
        self.module: nn.Module = policy.reading_with(loaded, dtype).to(device)

    @staticmethod
    def check_folders(options: Mapping[str, Any]) -> None:
        """Raise `ValueError` if the folder of the teacher lacks weights."""
        loading.check_folders(str(options.get("model", "")))

    @torch.no_grad()
    def __call__(self, batch: Batch, extra: Set[str] = frozenset()) -> StepOutput:
        width = batch.mask.shape[1]
        values = {name: pad_to(value, width, 1) for name, value in self.module(batch.steps, extra).items()}
        return StepOutput(values.pop("logp"), values)

    def rollout_weights(self) -> AbstractContextManager:
        """Raise ConfigError, because engines sample from the policy's own model."""
        raise ConfigError(
            "'rollout.policy' names a teacher, which cannot sample: name a reference of the policy's own "
            "weights (`frozen`, `ema`), or record answers of the teacher and use the engine `offline`"
        )

    def snapshot(self) -> None:
        """Do nothing, because the weights are fixed."""

    def update(self) -> None:
        """Do nothing, because the weights are fixed."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the weights are loaded from `model`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing, because the state is empty."""
