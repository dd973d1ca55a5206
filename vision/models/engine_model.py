"""A policy of tokens whose rollouts cost less: another model on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mmrl.runtime.modules import Derived
from mmrl.vision.decoding.token_steps import TokenPolicy
from mmrl.vision.models.processor import PromptEncoder


class EngineModel:
    """Speaks as a policy does, with what transforms make of its model."""

    def __init__(self, policy: TokenPolicy, transforms: Sequence[Callable]) -> None:
        self.policy, self._derived = policy, Derived(policy.model, transforms)

    @property
    def model(self) -> nn.Module:
        """The transformed model, with the policy's weights as they are."""
        return self._derived()

    @property
    def core(self) -> nn.Module:
        """The transformed model without its head."""
        return self.model.base_model

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """The policy's language."""
        return self.policy.prompt_encoder

    @property
    def compute(self) -> torch.dtype:
        """The precision of the policy."""
        return self.policy.compute

    @property
    def share_prefix(self) -> bool:
        """Whether rows share their prompt."""
        return self.policy.share_prefix
