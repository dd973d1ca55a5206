"""Wrapper of a pipeline's network that adds the forward pass and the guidance of the model family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmrl.diffusion.model_family import Condition, Guidance, PipelineFamily
from mmrl.diffusion.staged_network import StagedNetwork
from mmrl.runtime.modules import LOW


class FlowNetwork(nn.Module):
    """Trainable module: a pipeline's network with the forward pass and the guidance of its model family."""

    def __init__(self, network: nn.Module, family: PipelineFamily, compute: torch.dtype) -> None:
        super().__init__()
        self.network, self.family, self.compute = network, family, compute

    def forward(
        self,
        latents: Tensor,
        sigma: Tensor,
        condition: Condition,
        empty: Condition | None,
        guidance: Guidance,
    ) -> Tensor:
        """Compute guided velocities (B, *L) in float32 or float64.

        `empty` is the condition of the negative prompt; if given, both conditions run in one batch.
        """
        if isinstance(guidance, tuple):
            assert isinstance(self.network, StagedNetwork), "one scale for each network"
            scale = sigma.new_tensor(guidance)[self.network.stages(sigma)]
            strength: Any = scale.view(-1, *[1] * (latents.ndim - 1))
        else:
            scale, strength = torch.full_like(sigma, guidance), guidance
        if empty is not None:
            condition = {name: torch.cat([value, condition[name]]) for name, value in empty.items()}
            latents, sigma, scale = (torch.cat([part, part]) for part in (latents, sigma, scale))

        def run(network: nn.Module, rows: Tensor | slice) -> Tensor:
            texts = {name: value[rows] for name, value in condition.items()}
            return self.family.velocity(network, latents[rows], sigma[rows], texts, scale[rows])

        with torch.autocast(latents.device.type, self.compute, enabled=self.compute in LOW):
            staged = isinstance(self.network, StagedNetwork)
            velocity = self.network(run, sigma) if staged else run(self.network, slice(None))
            velocity = velocity if velocity.dtype == torch.float64 else velocity.float()
        if empty is None:
            return velocity
        without, with_text = velocity.chunk(2)  # in the order of the concatenation above
        return self.family.guide(with_text, without, strength)
