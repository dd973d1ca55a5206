"""The model that a token engine generates with: the policy itself, or a cheaper view of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from mmrl.runtime.modules import Derived
from mmrl.vision.models.processor import PromptEncoder


class TokenPolicy(Protocol):
    """What an engine needs of a token policy."""

    prompt_encoder: PromptEncoder
    model: nn.Module
    core: nn.Module  # the model without its head
    compute: torch.dtype  # of autocast
    share_prefix: bool  # whether rows with the same prompt share its keys and values


class EngineModel:
    """A token policy whose model went through transforms (pruning, quantisation), on the policy's weights."""

    def __init__(self, policy: TokenPolicy, transforms: Sequence[Callable]) -> None:
        self.prompt_encoder, self.compute = policy.prompt_encoder, policy.compute
        self.policy, self._derived = policy, Derived(policy.model, transforms)

    @property
    def model(self) -> nn.Module:
        """The transformed model; it follows the policy's weights."""
        return self._derived()

    @property
    def core(self) -> nn.Module:
        """The transformed model without its head."""
        return self.model.base_model

    @property
    def share_prefix(self) -> bool:
        """Whether rows with the same prompt share its keys and values, as the policy has it."""
        return self.policy.share_prefix
